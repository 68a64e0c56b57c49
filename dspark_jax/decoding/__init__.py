"""Drawing tokens, verifying drafts, speculative rounds, evaluation, the engine."""
