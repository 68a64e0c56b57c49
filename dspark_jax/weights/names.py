"""One two-way table between our parameter paths and the tensor names of checkpoint files.

Our arrays are the files' arrays with heads unfolded, so a rule is a name and the number of our
leading axes that form the file's rows; converting is a reshape in both directions.
"""

import dataclasses
import re

from dspark_jax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Rule:
    """`ours` <-> `theirs` ({} stands for the layer number); `rows` leading axes form the rows.

    rows = 0 marks arrays that are stored as they are (vectors, tables).
    """

    ours: str
    theirs: str
    rows: int = 0


_LAYER = (
    Rule("layers.{}.input_norm", "layers.{}.input_layernorm.weight"),
    Rule("layers.{}.post_norm", "layers.{}.post_attention_layernorm.weight"),
    Rule("layers.{}.attention.q", "layers.{}.self_attn.q_proj.weight", rows=3),
    Rule("layers.{}.attention.k", "layers.{}.self_attn.k_proj.weight", rows=2),
    Rule("layers.{}.attention.v", "layers.{}.self_attn.v_proj.weight", rows=2),
    Rule("layers.{}.attention.o", "layers.{}.self_attn.o_proj.weight", rows=1),
    Rule("layers.{}.attention.q_norm", "layers.{}.self_attn.q_norm.weight"),
    Rule("layers.{}.attention.k_norm", "layers.{}.self_attn.k_norm.weight"),
    Rule("layers.{}.mlp.gate", "layers.{}.mlp.gate_proj.weight"),
    Rule("layers.{}.mlp.up", "layers.{}.mlp.up_proj.weight"),
    Rule("layers.{}.mlp.down", "layers.{}.mlp.down_proj.weight"),
)

# What layers of some targets have besides. Experts stand here stacked, [E, out, in]; how files keep
# them is in experts.py.
_MOE = (
    Rule("layers.{}.mlp.router", "layers.{}.mlp.gate.weight"),
    Rule("layers.{}.mlp.experts.gate", "layers.{}.mlp.experts.gate_proj"),
    Rule("layers.{}.mlp.experts.up", "layers.{}.mlp.experts.up_proj"),
    Rule("layers.{}.mlp.experts.down", "layers.{}.mlp.experts.down_proj"),
)
_GEMMA = (
    Rule("layers.{}.pre_mlp_norm", "layers.{}.pre_feedforward_layernorm.weight"),
    Rule("layers.{}.post_mlp_norm", "layers.{}.post_feedforward_layernorm.weight"),
    Rule("layers.{}.layer_scalar", "layers.{}.layer_scalar"),
    Rule("layers.{}.extra_gate", "layers.{}.per_layer_input_gate.weight"),
    Rule("layers.{}.extra_out", "layers.{}.per_layer_projection.weight"),
    Rule("layers.{}.extra_norm", "layers.{}.post_per_layer_input_norm.weight"),
    Rule("layers.{}.dense_norm", "layers.{}.post_feedforward_layernorm_1.weight"),
    Rule("layers.{}.moe.input_norm", "layers.{}.pre_feedforward_layernorm_2.weight"),
    Rule("layers.{}.moe.output_norm", "layers.{}.post_feedforward_layernorm_2.weight"),
    Rule("layers.{}.moe.router", "layers.{}.router.proj.weight"),
    Rule("layers.{}.moe.router_scale", "layers.{}.router.scale"),
    Rule("layers.{}.moe.expert_scale", "layers.{}.router.per_expert_scale"),
    Rule("layers.{}.moe.experts.gate", "layers.{}.experts.gate_proj"),
    Rule("layers.{}.moe.experts.up", "layers.{}.experts.up_proj"),
    Rule("layers.{}.moe.experts.down", "layers.{}.experts.down_proj"),
    Rule("per_layer.embed", "embed_tokens_per_layer.weight"),
    Rule("per_layer.projection", "per_layer_model_projection.weight"),
    Rule("per_layer.norm", "per_layer_projection_norm.weight"),
)

# Hugging Face targets; of composite models the text part (safetensors.py).
TARGET = (
    Rule("embed", "model.embed_tokens.weight"),
    Rule("norm", "model.norm.weight"),
    Rule("lm_head", "lm_head.weight"),
    *(Rule(rule.ours, f"model.{rule.theirs}", rule.rows) for rule in (*_LAYER, *_MOE, *_GEMMA)),
)

# The target's tables that files of drafters may hold too, by their names there.
EMBED, LM_HEAD = "embed_tokens.weight", "lm_head.weight"

# Our name of what the files hold as the tables d2t and t2d (vocab_tables.py).
DRAFT_IDS = "draft_ids"

# The drafter, in the speculators and in the DeepSpec layout.
DRAFTER = (
    Rule("fc", "fc.weight"),
    Rule("hidden_norm", "hidden_norm.weight"),
    Rule("norm", "norm.weight"),
    *_LAYER,
    Rule("markov.w1", "markov_head.markov_w1.weight"),
    Rule("markov.w2", "markov_head.markov_w2.weight"),
    Rule("markov.gate", "markov_head.gate_proj.weight"),
    Rule("markov.gate_bias", "markov_head.gate_proj.bias"),
    Rule("markov.joint", "markov_head.joint_proj.weight"),
    Rule("markov.joint_bias", "markov_head.joint_proj.bias"),
    Rule("confidence.weight", "confidence_head.proj.weight"),
    Rule("confidence.bias", "confidence_head.proj.bias"),
)

# EAGLE-3, in both layouts.
EAGLE3 = (
    Rule("fc", "fc.weight"),
    Rule("input_norm", "input_norm.weight"),
    Rule("fc_norm.{}", "fc_norm.{}.weight"),
    Rule("norm", "norm.weight"),
    Rule("layers.{}.hidden_norm", "layers.{}.hidden_norm.weight"),
    *_LAYER,
)


def to_file(table: tuple[Rule, ...], ours: str) -> tuple[str, int]:
    """Our dotted path -> the file's tensor name and the rule's `rows`."""
    for rule in table:
        if match := _match(rule.ours, ours):
            return rule.theirs.format(*match.groups()), rule.rows
    raise KeyError(f"no rule for parameter {ours!r}")


def from_file(table: tuple[Rule, ...], theirs: str) -> str:
    """The file's tensor name -> our dotted path.

    Raises:
      UserError: for a tensor this model does not have.
    """
    for rule in table:
        if match := _match(rule.theirs, theirs):
            return rule.ours.format(*match.groups())
    raise UserError(f"tensor {theirs!r} does not belong to this kind of model")


def file_shape(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Shape of our array as it stands in the file."""
    if not rows:
        return shape
    return (_product(shape[:rows]), _product(shape[rows:]))


def file_slices(index: tuple[slice, ...], shape: tuple[int, ...], rows: int) -> tuple[slice, ...]:
    """The file's slices that hold `index` of our array.

    Of each group of axes that is one axis in the file only the first may be cut.
    """
    if not rows:
        return index
    return tuple(_folded(index[part], shape[part]) for part in (slice(0, rows), slice(rows, None)))


def _folded(index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
    inner = _product(shape[1:])
    for cut, size in zip(index[1:], shape[1:], strict=True):
        if cut.indices(size) != (0, size, 1):
            raise ValueError(f"cannot cut {index} out of folded axes {shape}")
    start, stop, _ = index[0].indices(shape[0])
    return slice(start * inner, stop * inner)


def _match(pattern: str, name: str) -> re.Match | None:
    return re.fullmatch(re.escape(pattern).replace(r"\{\}", r"(\d+)"), name)


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
