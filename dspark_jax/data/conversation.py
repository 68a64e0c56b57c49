"""The conversation to be answered: what prompts are before they are rendered or tokenised."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn: `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The system and user turns of one conversation, in order; the target writes the answers.

    Attributes:
        id: unique within one load, and the same at every load.
        source: the data set or family of prompts it came from.
        messages: at least one user message; an optional system message comes first.
    """

    id: str
    source: str
    messages: tuple[Message, ...]
