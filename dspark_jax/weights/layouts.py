"""The layouts that drafters are kept in, and what each of them can hold: one table.

    speculators   what `vllm serve DIR` reads: flags beside `transformer_layer_config`, layers
                  counted from 1; embedding and LM head are the target's and not in the file
                  (but of EAGLE-3)
    deepspec      what DeepSpec, SGLang and vLLM read, as the released DeepSeek drafters are: one
                  flat config, layers counted from 0; embedding and LM head are in the file as well

`FORMATS` is looked up by (layout, algorithm); `importing.py` and `export.py` know of no layout but
through it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from dspark_jax.core.errors import UserError
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.weights import eagle3_file, names
from dspark_jax.weights.compare import sees_markov
from dspark_jax.weights.config_parts import Origin, Verifier, layer_config, speculators_head
from dspark_jax.weights.drafter_file import DrafterFile, detect, read_shape

LAYOUTS = ("speculators", "deepspec")


@dataclasses.dataclass(frozen=True)
class Format:
    """One algorithm in one layout.

    Attributes:
      read_shape: config.json -> shape.
      config: shape, verifier, dtype, origin -> config.json.
      tensors: our names and the file's.
      shared: which of the target's tables belong into the file.
      inexpressible: why such a drafter cannot be written in this layout at all, or None.
      unservable: why vLLM (0.32) cannot run it although the layout holds it, or None.
      for_vllm: whether the layout is vLLM's, so that what it cannot run is written by force only.
      serve: the command of the user who has written one to a folder.
    """

    read_shape: Callable[[DrafterFile], Any]
    config: Callable[[Any, Verifier, str, Origin], dict[str, Any]]
    tensors: tuple[names.Rule, ...]
    shared: Callable[[Any], tuple[str, ...]]
    inexpressible: Callable[[Any], str | None]
    unservable: Callable[[Any], str | None]
    for_vllm: bool
    serve: str


def format_of(layout: str, algorithm: str, where: Any) -> Format:
    """The table's entry.

    Raises:
      UserError: there is none.
    """
    if (layout, algorithm) not in FORMATS:
        known = ", ".join(name for place, name in FORMATS if place == layout)
        raise UserError(
            f"{where}: a drafter of the kind {algorithm!r} in the {layout} layout; only {known}"
        )
    return FORMATS[layout, algorithm]


def read_config(file: DrafterFile) -> tuple[str, str, Any]:
    """Layout, algorithm and shape of the drafter that a config.json describes.

    Raises:
      UserError: none, or one that is not known here or described in a way that is not clear.
    """
    layout, algorithm = detect(file)
    return layout, algorithm, format_of(layout, algorithm, file.path).read_shape(file)


def algorithm_of(shape: DrafterShape) -> str:
    """The kind of drafter: eagle3, or dflash for a bare fill-in backbone, else dspark."""
    config = shape.config
    if config.algorithm == "eagle3":
        return "eagle3"
    bare = not config.markov_rank and not config.confidence_head
    return "dflash" if bare and not config.sample_from_anchor else "dspark"


# ---------------------------------------------------------------------------------------------
# speculators


def speculators_config(
    shape: DrafterShape, verifier: Verifier, dtype: str, origin: Origin | None = None
) -> dict[str, Any]:
    """config.json. Every flag is written: readers do not agree on what an absent one means."""
    config, kind = shape.config, algorithm_of(shape)
    architecture = "DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"
    return {
        **speculators_head(architecture, kind, config.num_proposals, verifier),
        "transformer_layer_config": layer_config(shape),
        # Engines count layers that have run: the output of layer i is i + 1.
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": shape.draft_vocab,
        "mask_token_id": config.mask_token_id,
        **_head_config(shape),
        "sample_from_anchor": config.sample_from_anchor,
        # vLLM takes False to mean causal blocks in every layer of a "dflash" drafter, not only in
        # sliding ones (vLLM 0.32, configs/speculators/algos.py); it reads it for no other kind.
        "sliding_window_non_causal": kind == "dflash",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "rope_theta": shape.rope.theta,  # where the JAX servers look
    }


def _head_config(shape: DrafterShape) -> dict[str, Any]:
    config = shape.config
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head if config.markov_rank else "vanilla",
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": sees_markov(shape),
        # The file's embedding has this factor already; engines need not know of it.
        **({"embed_scale": shape.embed_scale} if shape.embed_scale != 1.0 else {}),
    }


def _pruned_or_scaled(shape: DrafterShape) -> tuple[str, ...]:
    """The head's rows of a pruned vocabulary; a scaled embedding, as no engine scales."""
    scaled = (names.EMBED,) if shape.embed_scale != 1.0 else ()
    return scaled + ((names.LM_HEAD,) if shape.pruned else ())


def unservable(shape: DrafterShape) -> str | None:
    """Why vLLM (0.32) cannot run such a drafter, naming the flag, or None."""
    config = shape.config
    if shape.logit_softcap:  # qwen3_dspark.py: LogitsProcessor without soft_cap
        return (
            f"the target's final_logit_softcapping={shape.logit_softcap:g}: vLLM does not cap the "
            "logits of Qwen3 draft layers and would draft from another distribution"
        )
    if config.markov_head in ("gated", "rnn"):
        return (
            f"drafter.markov_head={config.markov_head!r}: vLLM reads only vanilla heads and would "
            "draft wrongly (SGLang reads all three)"
        )
    if not config.markov_rank and algorithm_of(shape) == "dspark":
        return (
            f"drafter.markov_rank=0 with sample_from_anchor={config.sample_from_anchor} and "
            f"confidence_head={config.confidence_head}: vLLM runs rank 0 only as DFlash, fill-in "
            "and without confidence head (speculators reads it)"
        )
    return None


# ---------------------------------------------------------------------------------------------
# DeepSpec


def deepspec_config(
    shape: DrafterShape, verifier: Verifier, dtype: str, origin: Origin
) -> dict[str, Any]:
    """config.json: the target family's, flat, with DeepSpec's fields (dspark/qwen3/config.py).

    `sample_from_anchor` is no field of DeepSpec's, but one that engines look for.
    """
    config = shape.config
    return {
        "architectures": ["Qwen3DSparkModel"],
        **layer_config(shape),
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": shape.target_layers,
        "num_anchors": origin.recipe["train"]["num_anchors"],
        **_head_config(shape),
        "sample_from_anchor": True,
        "dtype": dtype,
        "rope_theta": shape.rope.theta,
    }


def flat_dflash_config(
    shape: DrafterShape, verifier: Verifier, dtype: str, origin: Origin
) -> dict[str, Any]:
    """config.json of a fill-in DFlash drafter, as z-lab's are: no heads, and `dflash_config`.

    Readers of it look for mask and layers there (tpu-inference) or at the top (SGLang).
    """
    config = shape.config
    again = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    return {
        "architectures": ["DFlashDraftModel"],
        **layer_config(shape),
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "block_size": config.block_size,
        **again,
        "dflash_config": again,
        "num_target_layers": shape.target_layers,
        "sample_from_anchor": False,
        "dtype": dtype,
        "rope_theta": shape.rope.theta,
    }


def _not_flat(shape: DrafterShape) -> str | None:
    config = shape.config
    if shape.pruned:
        return (
            f"drafter.vocab_size={shape.draft_vocab}: the deepspec layout has no table for a "
            "pruned vocabulary; write speculators"
        )
    if algorithm_of(shape) == "dflash" and shape.embed_scale != 1.0:
        return (
            "a DFlash drafter has no embedding in the deepspec layout, and readers would give it "
            "the target's without its factor; write speculators"
        )
    if algorithm_of(shape) == "dspark" and not config.sample_from_anchor:
        return (
            f"drafter.sample_from_anchor=False with markov_rank={config.markov_rank} and "
            f"confidence_head={config.confidence_head}: DeepSpec's drafters are anchor-first, "
            "fill-in ones have no heads there; write speculators"
        )
    return None


def _nothing(_: Any) -> Any:
    return None


# ---------------------------------------------------------------------------------------------

_VLLM_FLAT = (
    "vllm serve {target} --speculative-config "
    '\'{{"method": "%s", "model": "{folder}", "num_speculative_tokens": {proposals}}}\''
)

FORMATS: dict[tuple[str, str], Format] = {
    ("speculators", kind): Format(
        read_shape=read_shape,
        config=speculators_config,
        tensors=names.DRAFTER,
        shared=_pruned_or_scaled,
        inexpressible=_nothing,
        unservable=unservable,
        for_vllm=True,
        serve="vllm serve {folder}",
    )
    for kind in ("dspark", "dflash")
} | {
    ("deepspec", "dspark"): Format(
        read_shape=read_shape,
        config=deepspec_config,
        tensors=names.DRAFTER,
        shared=lambda _: (names.EMBED, names.LM_HEAD),
        inexpressible=_not_flat,
        unservable=unservable,
        for_vllm=False,
        serve=_VLLM_FLAT % "dspark",
    ),
    ("deepspec", "dflash"): Format(
        read_shape=read_shape,
        config=flat_dflash_config,
        tensors=names.DRAFTER,
        shared=lambda _: (),  # its class has neither
        inexpressible=_not_flat,
        unservable=unservable,
        for_vllm=False,
        serve=_VLLM_FLAT % "dflash",
    ),
    ("speculators", "eagle3"): Format(
        read_shape=eagle3_file.read_eagle3_shape,
        config=eagle3_file.speculators_config,
        tensors=names.EAGLE3,
        shared=lambda _: (names.EMBED, names.LM_HEAD),
        inexpressible=eagle3_file.capped,
        unservable=_nothing,
        for_vllm=True,
        serve="vllm serve {folder}",
    ),
    ("deepspec", "eagle3"): Format(
        read_shape=eagle3_file.read_eagle3_shape,
        config=eagle3_file.deepspec_config,
        tensors=names.EAGLE3,
        shared=lambda _: (names.EMBED, names.LM_HEAD),
        inexpressible=eagle3_file.not_flat,
        unservable=eagle3_file.unservable_flat,
        for_vllm=False,
        serve="",
    ),
}
