"""From prompts to token rows: prompts, chat templates and loss masks, responses, batches."""
