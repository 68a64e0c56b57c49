"""The public DSpark recipe as a starting point of config files, and its ablations by name."""

import dataclasses
import re
from collections.abc import Sequence

from ml_collections import config_dict

from dspark_jax.core.config import default_config
from dspark_jax.core.errors import UserError
from dspark_jax.core.loss_config import EAGLE3_LOSS

VARIANTS = ("no_markov", "dflash", "eagle3", "gated", "rnn", "no_confidence", "block16", "depthN")


def public_recipe(
    target: str, *, taps: Sequence[int], mask_token_id: int, variant: str = ""
) -> config_dict.ConfigDict:
    """The recipe of the released Qwen3 drafters: 5 layers, blocks of 7, rank 256, 512 anchors.

    A global batch of 512 rows goes in micro-batches of 16; both may be changed, the result of a
    step only depends on the first. Prompts are for the user to name.

    Args:
      target: a hub id or a folder.
      taps: 0-based layers of the target; mask_token_id: an id that it never uses.
      variant: one of `VARIANTS`, or several joined by "+": "gated+block16".
    """
    c = default_config()
    c.target = target
    c.mesh.update(fsdp=-1, tp=1)
    c.data.update(
        prompts="generator:10000",
        temperature=1.0,
        max_prompt_tokens=1024,
        max_new_tokens=2048,
        sequence_length=3072,
    )
    c.drafter.update(target_layer_ids=tuple(taps), mask_token_id=mask_token_id)
    c.train.update(global_batch_size=512, accumulation=32)
    for name in filter(None, variant.split("+")):
        _apply(c, name)
    return c


def eagle3(c: config_dict.ConfigDict) -> None:
    """Makes the config's drafter an EAGLE-3 one, with the same taps, data and tokens per round."""
    c.drafter.update(
        algorithm="eagle3",
        mask_token_id=-1,
        markov_head="none",
        markov_rank=0,
        confidence_head=False,
        sample_from_anchor=True,
        num_layers=1,
        init="normal",
    )
    c.loss.update(dataclasses.asdict(EAGLE3_LOSS))


def _apply(c: config_dict.ConfigDict, name: str) -> None:
    depth = re.fullmatch(r"depth([1-9]\d*)", name)
    if name == "no_markov":
        c.drafter.update(markov_head="none", markov_rank=0)
    elif name == "dflash":  # the original: also fill-in and without confidence head
        c.drafter.update(
            markov_head="none",
            markov_rank=0,
            confidence_head=False,
            sample_from_anchor=False,
            block_size=c.drafter.block_size + 1,
        )
    elif name == "eagle3":
        eagle3(c)
    elif name in ("gated", "rnn"):
        c.drafter.markov_head = name
    elif name == "no_confidence":
        c.drafter.confidence_head = False
    elif name == "block16":
        c.drafter.block_size = 16
        c.loss.decay = 7.0
    elif depth:
        c.drafter.num_layers = int(depth.group(1))
    else:
        raise UserError(f"unknown variant {name!r}: there are {', '.join(VARIANTS)}")
