"""EAGLE-3 in files: what its config.json says in either layout, and how it is written.

    speculators   type "eagle3" (speculators models/eagle3/config.py, which vLLM reads too): Qwen3
                  or Llama layers, any of the norm flags, a pruned vocabulary. The target's
                  embedding and LM head are in the file: speculators 0.9 calls the first optional,
                  and then drafts with whatever lay in that memory
    deepspec      class Qwen3Eagle3Model (DeepSpec modeling/eagle3/qwen3): Qwen3 layers, none of the
                  flags, the whole vocabulary, embedding and LM head in the file

A chain has no length of its own. What is drafted per round is `speculative_tokens` in the first
layout and `ttt_length`, the length it was trained with, in the second.
"""

from typing import Any

from dspark_jax.core.config import DrafterConfig, Eagle3Config
from dspark_jax.core.errors import UserError
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.weights.config_parts import Origin, Verifier, layer_config, speculators_head
from dspark_jax.weights.drafter_file import DrafterFile, check_layers, complete, detect, taps_of

# False in every reader where they are absent. norm_before_residual is not: vLLM takes it for True.
_NORM_FLAGS = ("norm_before_fc", "fc_norm", "norm_output")


def read_eagle3_shape(file: DrafterFile) -> DrafterShape:
    """The shape of an EAGLE-3 drafter; target_layers is 0 where the file does not tell.

    Raises:
      UserError: a field is absent, of the wrong kind or in dispute, or means a drafter that this
        package cannot express. By name.
    """
    layout, _ = detect(file)
    family = check_layers(file, ("qwen3",) if layout == "deepspec" else ("qwen3", "llama"))
    if (layers := file.require("num_hidden_layers", int, 1)) != 1:
        raise UserError(
            f"{file.path}: num_hidden_layers={layers}; only EAGLE-3 drafters of one layer (the "
            "layouts do not agree on what a second one sees)"
        )
    if file.find("embed_requires_grad", bool):
        raise UserError(
            f"{file.path}: embed_requires_grad=True is not supported: drafters here share the "
            "target's embedding, one that trained its own cannot be imported"
        )
    vocab = file.require("vocab_size", int, 1)
    if layout == "deepspec":
        options = Eagle3Config(step_loss_decay=float(file.require("step_loss_decay", float)))
        steps, drafted = file.require("ttt_length", int, 1), vocab
    else:
        flags = {name: file.find(name, bool) or False for name in _NORM_FLAGS}
        before = file.find("norm_before_residual", bool)
        if before is None:
            raise UserError(
                f"{file.path}: norm_before_residual is missing, which speculators takes for false "
                "and vLLM for true: add what the drafter was trained with"
            )
        options = Eagle3Config(qk_norm=family == "qwen3", norm_before_residual=before, **flags)
        steps, drafted = _speculative_tokens(file), file.require("draft_vocab_size", int, 1)
    if drafted > vocab:
        raise UserError(f"{file.path}: draft_vocab_size={drafted}, vocab_size={vocab}")
    target_layers = file.find("num_target_layers", int) or 0
    config = DrafterConfig(
        algorithm="eagle3",
        target_layer_ids=taps_of(file, target_layers),
        mask_token_id=-1,
        block_size=steps,
        num_layers=1,
        markov_head="none",
        markov_rank=0,
        confidence_head=False,
        vocab_size=0 if drafted == vocab else drafted,
        intermediate_size=file.require("intermediate_size", int, 1),
        num_heads=file.require("num_attention_heads", int, 1),
        num_kv_heads=file.require("num_key_value_heads", int, 1),
        head_dim=file.require("head_dim", int, 1),
        dtype="float32",
        eagle3=options,
    )
    return complete(file, config, vocab, target_layers)


def _speculative_tokens(file: DrafterFile) -> int:
    methods = file.section("speculators_config").get("proposal_methods") or []
    first = methods[0] if methods and isinstance(methods[0], dict) else {}
    steps = first.get("speculative_tokens")
    if type(steps) is not int or steps < 1:
        raise UserError(
            f"{file.path}: speculators_config.proposal_methods[0].speculative_tokens={steps!r}: "
            "how many tokens are drafted per round is never guessed"
        )
    return steps


def speculators_config(
    shape: DrafterShape, verifier: Verifier, dtype: str, origin: Origin | None = None
) -> dict[str, Any]:
    """config.json of the speculators layout, every flag in it: readers differ on absent ones."""
    config, options = shape.config, shape.config.eagle3
    return {
        **speculators_head("Eagle3DraftModel", "eagle3", config.num_proposals, verifier),
        "transformer_layer_config": {
            **layer_config(shape, "qwen3" if options.qk_norm else "llama"),
            # vLLM's class for Llama layers takes three taps otherwise.
            "num_aux_hidden_states": len(config.target_layer_ids),
        },
        # Engines count layers that have run: the output of layer i is i + 1.
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "draft_vocab_size": shape.draft_vocab,
        "norm_before_residual": options.norm_before_residual,
        **{name: getattr(options, name) for name in _NORM_FLAGS},
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "rope_theta": shape.rope.theta,  # where the JAX servers look
    }


def deepspec_config(
    shape: DrafterShape, verifier: Verifier, dtype: str, origin: Origin
) -> dict[str, Any]:
    """config.json of the flat layout: the target family's with DeepSpec's fields."""
    config = shape.config
    return {
        "architectures": ["Qwen3Eagle3Model"],
        **layer_config(shape),
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": shape.target_layers,
        "ttt_length": config.block_size,
        "step_loss_decay": config.eagle3.step_loss_decay,
        "draft_num_hidden_layers": config.num_layers,
        "dtype": dtype,
        "rope_theta": shape.rope.theta,
    }


def capped(shape: DrafterShape) -> str | None:
    """Neither class caps its logits as such a target does: the drafts would be others."""
    if not shape.logit_softcap:
        return None
    return (
        f"the target's final_logit_softcapping={shape.logit_softcap:g}: no reader of EAGLE-3 files "
        "written here caps the draft's logits"
    )


def not_flat(shape: DrafterShape) -> str | None:
    """Why DeepSpec's class cannot be this drafter, naming the flag, or None."""
    options = shape.config.eagle3
    if reason := capped(shape):
        return reason
    if shape.pruned:
        return (
            f"drafter.vocab_size={shape.draft_vocab}: the deepspec layout has no table for a "
            "pruned vocabulary; write speculators"
        )
    for name, only in (
        ("qk_norm", True),
        ("norm_before_residual", False),
        *((name, False) for name in _NORM_FLAGS),
    ):
        if getattr(options, name) != only:
            return (
                f"drafter.eagle3.{name}={not only}: DeepSpec's class has no such flag; write "
                "speculators"
            )
    return None


def unservable_flat(shape: DrafterShape) -> str | None:
    """vLLM (0.32) has no class of that name and would not be told the layers either."""
    return "vLLM does not know DeepSpec's class Qwen3Eagle3Model; write speculators for it"
