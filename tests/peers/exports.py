"""Exports of drafters of every kind, and what our own code answers for them.

Weights are random and large enough for every part to matter. An export is made as a user makes
one: from a run's checkpoint, through `convert`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from tiny_drafter import random_weights

from dspark_jax.convert import convert
from dspark_jax.core.config import RunConfig
from dspark_jax.core.sharding import place, spec
from dspark_jax.data.opened import OpenedTarget, open_target
from dspark_jax.models.drafter import Drafter
from dspark_jax.models.target import TargetHead
from dspark_jax.training.checkpoint import RunRecord, save_drafter, write_record
from dspark_jax.weights.compare import build_drafter
from dspark_jax.weights.safetensors import read_json

NO_HEADS = {
    "drafter.markov_head": "none",
    "drafter.markov_rank": 0,
    "drafter.confidence_head": False,
}
DFLASH = NO_HEADS | {"drafter.sample_from_anchor": False}
PRUNED = {"drafter.vocab_size": 97}

# Changes to a run's config (tiny.make_config); every kind of drafter that can be written.
KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"drafter.markov_head": "gated"},
    "rnn": {"drafter.markov_head": "rnn"},
    "fill-in": {"drafter.sample_from_anchor": False},
    "dflash": DFLASH,
    "rank 0": {"drafter.markov_head": "none", "drafter.markov_rank": 0},
    "rank 0 alone": NO_HEADS,
    "no confidence": {"drafter.confidence_head": False},
    "confidence alone": {"drafter.confidence_with_markov": False},
    "pruned": PRUNED,
    "pruned rnn": PRUNED | {"drafter.markov_head": "rnn"},
    "pruned dflash": PRUNED | DFLASH,
    "own sizes": {"drafter.num_heads": 2, "drafter.head_dim": 16, "drafter.intermediate_size": 40},
    "deep": {"drafter.num_layers": 3, "drafter.block_size": 5},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """An export and the arrays it was made from."""

    directory: Path
    record: RunRecord
    arrays: dict[str, np.ndarray]

    def drafter(self) -> Drafter:
        """Our drafter with the arrays of the checkpoint."""
        return build_drafter(self.record.shape, self.arrays)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A packed sequence with tapped states, and the anchors whose blocks are drafted."""

    tokens: np.ndarray  # i32[S]
    documents: np.ndarray  # i32[S], from 1
    positions: np.ndarray  # i32[S], restarting per document
    taps: np.ndarray  # f32[S, L, D]
    anchors: np.ndarray  # i32[A], ascending, a whole block fits behind each


def make_case(
    folder: Path,
    config: RunConfig,
    *,
    layout: str = "speculators",
    seed: int = 1,
    dtype: str = "float32",
) -> Case:
    """A run with random weights in `folder`/run and its export in `folder`/export."""
    target = open_target(config.target, config.target_dtype)
    described = read_json(target.directory / "config.json")
    record = RunRecord(
        config,
        target.fingerprint,
        str(target.directory),
        target.model.config,
        tuple(described["architectures"]),
    )
    # Logits of a few units whatever the width, so that one tolerance fits all.
    width = (tiny.HIDDEN / record.shape.hidden_size) ** 0.5
    arrays = {
        name: array if "norm" in name or name == "draft_ids" else np.float32(array * width)
        for name, array in random_weights(record.shape, seed).items()
    }
    write_record(folder / "run", record)
    save_drafter(folder / "run", arrays, 1)
    convert(str(folder / "run"), layout, folder / "export", dtype=dtype, force=True)
    return Case(folder / "export", record, arrays)


def tiny_config(folder: Path, changes: Mapping[str, Any], **target: Any) -> RunConfig:
    """The config of a run on the tiny random target; `target` as for tiny.make_target."""
    directory = folder / "target"
    if not directory.exists():
        tiny.make_target(directory, **target)
    prompts = folder / "prompts.jsonl"
    tiny.write_prompts(prompts, 4)
    return tiny.make_config(directory, prompts, changes)


def random_inputs(case: Case, seed: int = 3) -> Inputs:
    """Two packed documents of random tokens and states."""
    rng = np.random.default_rng(seed)
    shape = case.record.shape
    lengths, block = (13, 17), shape.config.block_size
    size = (sum(lengths), len(shape.config.target_layer_ids), shape.hidden_size)
    anchors = [3, 7, 12, 13, 14, 20, sum(lengths) - block - 1]  # both ends of both documents
    return Inputs(
        rng.integers(0, shape.vocab_size, size[0]).astype(np.int32),
        np.repeat(np.int32([1, 2]), lengths),
        np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        rng.standard_normal(size, np.float32),
        np.int32(anchors),
    )


def real_inputs(target: OpenedTarget, taps: tuple[int, ...], text: str, anchors) -> Inputs:
    """A chat of the target and the states that it really has there."""
    turns = [{"role": "user", "content": text}]
    ids = target.tokenizer.apply_chat_template(turns, return_dict=False, add_generation_prompt=True)
    tokens = np.int32(ids)
    output = jax.jit(lambda model, ids: model(ids, taps=taps).taps)(target.model, tokens[None])
    length = len(tokens)
    assert max(anchors) < length - 8
    return Inputs(
        tokens,
        np.ones(length, np.int32),
        np.arange(length, dtype=np.int32),
        np.asarray(output[0], np.float32),
        np.int32(anchors),
    )


def ours(
    case: Case, head: TargetHead, given: Inputs, *, anchor_step: bool = False
) -> dict[str, np.ndarray]:
    """Our hidden states [A, P, D], base logits [A, P, V_d], the same with Markov bias ("logits")
    and confidence logits [A, P] of the blocks.

    Slot by slot as in decoding, the tokens of the sequence given as those drafted before.

    Args:
      anchor_step: in fill-in blocks, let the Markov state pass slot 0 first, which we do not.
    """
    drafter, config = case.drafter(), case.record.config.drafter
    first = config.block_size - config.num_proposals
    prev = given.tokens[given.anchors[:, None] + np.arange(config.num_proposals)]
    starts = given.anchors - given.positions[given.anchors]

    @jax.jit
    def run(drafter: Drafter, head: TargetHead, prev):
        context = drafter.context(given.taps[None], given.positions[None])
        hidden = drafter.backbone(
            head,
            jnp.asarray(given.tokens[given.anchors])[None],
            jnp.asarray(given.positions[given.anchors])[None],
            context,
            jnp.asarray(starts)[None],
            jnp.asarray(given.anchors)[None],
        )
        whole = jax.sharding.reshard(hidden[0], spec("batch", None, None))
        hidden = whole[:, first:]
        answer = {"hidden": hidden, "base": drafter.head(head).logits(hidden)}
        answer["logits"] = answer["base"]
        rows = None
        if config.markov_rank:
            state, slots = drafter.markov.state(len(prev)), []
            if anchor_step:
                base = drafter.head(head).logits(whole[:, :1])[:, 0]
                _, state = drafter.markov.biased(base, prev[:, 0], whole[:, 0], state)
            for slot in range(config.num_proposals):
                one, state = drafter.markov.biased(
                    answer["base"][:, slot], prev[:, slot], hidden[:, slot], state
                )
                slots.append(one)
            answer["logits"] = jnp.stack(slots, axis=1)
            rows = drafter.markov.rows(prev)
        if config.confidence_head:
            answer["confidence"] = drafter.confidence_logits(hidden, rows)
        return answer

    return {
        name: np.asarray(x) for name, x in run(drafter, head, place(prev, "batch", None)).items()
    }
