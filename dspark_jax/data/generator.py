"""A seeded generator of short, varied, single-turn prompts: enough to train on without a hub.

Four families in equal parts, one function each: word problems, code, questions, rewriting. The
phrases they are filled with live in `phrases.py`.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from dspark_jax.core.errors import UserError
from dspark_jax.data import phrases
from dspark_jax.data.conversation import Conversation, Message

# One prompt in HELDOUT_ONE_IN belongs to the held-out split, for every seed.
HELDOUT_ONE_IN = 8
# A family that yields nothing new in this many tries in a row is used up.
_MAX_TRIES = 20_000


class Words:
    """The lists of `phrases`, of each the first `fillings` entries; 0 = all."""

    def __init__(self, fillings: int = 0):
        self._end = fillings or None

    def __getattr__(self, name: str) -> Any:
        return self.few(getattr(phrases, name))

    def few(self, entries: Sequence[Any]) -> Sequence[Any]:
        """The first entries of a list that is an entry itself."""
        return entries[: self._end]


def generate_prompts(
    n: int, seed: int, split: Literal["train", "heldout"] = "train", fillings: int = 0
) -> list[Conversation]:
    """The first `n` prompts of the stream of `seed`, families taking turns; no prompt twice.

    The result depends on the arguments only (neither on the platform nor on `PYTHONHASHSEED`), and
    a smaller `n` gives a prefix of a larger one. A prompt's split is a function of its text, so
    train and heldout are disjoint whatever the seeds. They share the sentence patterns: held-out
    figures measure new fillings, not new kinds of prompts. With few `fillings` (topics, names,
    texts for each blank; 0 = all there are) it is one small domain, in which a short training
    goes far.

    Raises:
        UserError: `n` is negative or larger than a family can fill, or `split` is unknown.
    """
    if split not in ("train", "heldout"):
        raise UserError(f"prompt generator: split {split!r} is unknown; use 'train' or 'heldout'")
    if fillings < 0 or fillings == 1:
        raise UserError(f"prompt generator: {fillings} fillings for a blank; use 2 or more")
    if n < 0:
        raise UserError(f"prompt generator: {n} prompts asked for; ask for 0 or more")
    # A family draws from its own generator, so that the families cannot disturb one another.
    # random.Random seeds itself from all bytes of a string, not from its salted hash().
    words = Words(fillings)
    streams = [
        (source, _distinct(source, random.Random(f"{seed}/{split}/{source}"), split, words))
        for source in FAMILIES
    ]
    prompts = []
    for index in range(n):
        source, texts = streams[index % len(streams)]
        text = next(texts, None)
        if text is None:
            raise UserError(
                f"prompt generator: {n} prompts asked for, but '{source}' has no more after "
                f"{index} prompts in all; ask for fewer, or name a file of prompts"
            )
        prompts.append(
            Conversation(f"generator-{split}-{seed}-{index}", source, (Message("user", text),))
        )
    return prompts


def split_of(text: str) -> Literal["train", "heldout"]:
    """The split that a prompt belongs to, from a hash of its text."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0 else "train"


def _distinct(source: str, rng: random.Random, split: str, words: Words) -> Iterator[str]:
    """Texts of one family and one split, none twice, until the family is used up."""
    seen = set()
    tries = 0
    while tries < _MAX_TRIES:
        text = FAMILIES[source](rng, words)
        tries += 1
        if text not in seen and split_of(text) == split:
            seen.add(text)
            tries = 0
            yield text


def word_problem(rng: random.Random, words: Words) -> str:
    """A story with numbers; every answer is a whole number."""
    name, other = rng.sample(words.NAMES, 2)
    thing = rng.choice(words.THINGS)
    small, few = rng.randint(2, 12), rng.randint(2, 9)
    many = rng.randint(20, 95)
    part = rng.randint(3, many - 5)
    price = rng.randint(2, 25)
    speed = 5 * rng.randint(6, 20)
    story = rng.choice(
        (
            f"{name} has {many} {thing} and gives {part} of them to {other}. "
            f"How many {thing} does {name} have left?",
            f"{name} buys {small} {thing} for ${price} each. How much does {name} pay in total?",
            f"{name} packs {small * few} {thing} into boxes of {small}. How many boxes are needed?",
            f"{name} collects {small} {thing} every day. "
            f"How many {thing} does {name} have after {few} weeks?",
            f"{name} has {many} {thing}. {other} has {part} more than {name}. "
            f"How many {thing} do they have together?",
            f"A train travels at {speed} kilometres per hour for {few} hours. "
            f"How far does it travel?",
            f"A car drives {speed * few} kilometres in {few} hours. "
            f"What is its average speed in kilometres per hour?",
            f"{name} earns ${price} an hour and works {small} hours a day. "
            f"How much does {name} earn in {few} days?",
            f"A shop sells {thing} at ${price} each. {name} buys {small} and {other} buys {few}. "
            f"How much do they spend together?",
            f"{name} is {many} years old and {other} is {part} years younger. "
            f"What is the sum of their ages?",
            f"There are {few} shelves with {small} {thing} on each, and {part} more on the floor. "
            f"How many {thing} are there in all?",
            f"{name} reads {small} pages each evening. The book has {small * few * 2} pages. "
            f"How many evenings does it take {name} to finish?",
            f"A garden is {many} metres long and {small} metres wide. "
            f"What are its area and its perimeter?",
            f"{name} pays for {small} {thing} at ${price} each with a ${small * price + few} "
            f"voucher. How much of the voucher is left?",
            f"{name}, {other} and a friend share {3 * many} {thing} equally. "
            f"How many {thing} does each of them get?",
            f"{name} starts with {many} {thing}, loses {part}, and then doubles what is left. "
            f"How many {thing} does {name} have now?",
            f"A coat costs ${20 * few}. In a sale the price drops by {5 * rng.randint(1, 10)} "
            f"percent. What is the sale price?",
            f"The sum of two numbers is {many}. One of them is {part}. What is the other one, "
            f"and what is their difference?",
            f"What is {many} + {part} * {small}?",
            f"What is {many * small} divided by {small}, minus {part}?",
            f"A recipe for {few} people needs {few * small} {rng.choice(words.UNITS)} of "
            f"{rng.choice(words.INGREDIENTS)}. How much is needed for {few + small} people?",
        )
    )
    return story + rng.choice(("", "", " Explain each step.", " Show your work."))


def code_task(rng: random.Random, words: Words) -> str:
    """A small Python function to write."""
    close = rng.choice(words.CODE_CLOSINGS)
    kind = rng.randrange(5)
    if kind == 0:
        elements, tests, results = rng.choice(words.CODE_LISTS)
        task = (
            f"Write a Python function that takes a list of {elements} and returns "
            f"{rng.choice(words.few(results))} that {rng.choice(words.few(tests))}."
        )
    elif kind == 1:
        task = (
            f"Write a Python function `{rng.choice(words.CODE_NAMES)}(text)` that returns "
            f"{rng.choice(words.CODE_STRINGS)}."
        )
    elif kind == 2:
        task = (
            f"Write a Python function that {rng.choice(words.CODE_NUMBERS)}. "
            f"Show its result for {rng.randint(2, 60)}."
        )
    elif kind == 3:
        field, other = rng.sample(words.FIELDS, 2)
        record = rng.choice(words.RECORDS)
        action = rng.choice(words.CODE_RECORDS).format(field=field, other=other)
        task = (
            f"Each {record} is a dictionary with the keys '{field}' and '{other}'. "
            f"Write a Python function that {action}."
        )
    else:
        field, other = rng.sample(words.FIELDS, 2)
        record = rng.choice(words.RECORDS)
        method = rng.choice(words.CODE_METHODS)
        task = (
            f"Write a Python class `{record.title()}` with the attributes `{field}` and `{other}` "
            f"and a method that {method}."
        )
    return task + close


def question(rng: random.Random, words: Words) -> str:
    """Explain, define, compare, list, advise: short questions about everyday subjects."""
    group = rng.choice(words.TOPIC_GROUPS)
    topic, other = rng.sample(words.few(group), 2)
    reader = rng.choice(words.READERS)
    length = rng.choice(words.LENGTHS)
    count = rng.choice(("two", "three", "four", "five"))
    return rng.choice(
        (
            f"Explain {topic} to {reader} {length}.",
            f"What is {topic}? Answer {length}.",
            f"Define {topic} {length} and give {count} examples.",
            f"What is the difference between {topic} and {other}? Answer {length}.",
            f"Compare {topic} with {other} for {reader}.",
            f"List {count} facts about {topic}.",
            f"List {count} things that {topic} and {other} have in common.",
            f"Why does {topic} matter to {reader}?",
            f"Give {count} reasons to learn about {topic}.",
            f"What are {count} common mistakes people make about {topic}?",
            f"Write {count} quiz questions about {topic}, with answers.",
            f"How would you teach {topic} to {reader}?",
            f"Which should {reader} learn about first, {topic} or {other}, and why?",
            f"Describe {topic} {length}, using an everyday example.",
        )
    )


def rewriting(rng: random.Random, words: Words) -> str:
    """A sentence or two, and what to do with them."""
    name = rng.choice(words.NAMES)
    time, act = rng.choice(words.TIMES), rng.choice(words.ACTS)
    place, also = rng.choice(words.PLACES), rng.choice(words.SECOND_CLAUSES)
    text = rng.choice(
        (
            f"{time}, {name} {act} {place}, {also}.",
            f"{name} {act} {place}. It happened {time[0].lower()}{time[1:]}, {also}.",
            f"Nobody knew that {name} {act} {place}, {also}.",
        )
    )
    return rng.choice(words.REWRITES).format(text=text)


FAMILIES: dict[str, Callable[[random.Random, Words], str]] = {
    "word_problems": word_problem,
    "code": code_task,
    "questions": question,
    "rewriting": rewriting,
}
