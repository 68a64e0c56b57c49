"""The shape of a target, and how a Hugging Face config says it; what is not covered is refused.

One `TargetConfig` holds every family: the plain decoder of Llama and Qwen3, and groups of options
for what the others add (experts, sliding layers, Gemma's sandwich, M-RoPE).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.core.errors import UserError
from dspark_jax.models.layers import RopeConfig
from dspark_jax.models.rope_config import ropes_from_hf

# model_type -> the class that engines know it by.
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
}
# Those whose config nests the text model.
_COMPOSITE = ("qwen3_vl", "gemma3", "gemma4", "gemma4_unified")
# What released Gemma 3 configs leave to the class (transformers, Gemma3TextConfig).
_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
# Fields that must have one value: what they are elsewhere is not implemented.
_PLAIN = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "quantization_config": None,
}
_GEMMA = {
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "quantization_config": None,
    "attn_logit_softcapping": None,
}


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP (Qwen3-MoE) or beside it (Gemma 4)."""

    count: int
    per_token: int
    width: int  # of one expert
    normalise: bool  # whether the weights of the chosen ones sum to 1
    dense_layers: tuple[int, ...] = ()  # layers that have a plain MLP instead


@dataclasses.dataclass(frozen=True)
class SlidingConfig:
    """Layers that see only the last positions, with a RoPE of their own."""

    layers: tuple[bool, ...]  # which of them slide
    window: int  # positions that a query sees, its own included
    rope: RopeConfig


@dataclasses.dataclass(frozen=True)
class Gemma4Config:
    """What Gemma 4 adds to Gemma 3."""

    global_head_dim: int  # of the layers that do not slide
    global_kv_heads: int
    k_eq_v: bool  # in those layers the keys' projection gives the values too
    shared_kv_layers: int  # so many last layers see keys and values of an earlier one of their kind
    double_wide_mlp: bool  # and have an MLP of twice the width
    per_layer_width: int  # P, of the input that every layer has of each token; 0 = none
    per_layer_vocab: int


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Shape of a target; hashable, so it may be a static argument."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig  # with sliding layers: of the others
    tie_embeddings: bool
    max_positions: int
    dtype: str = "float32"
    query_scale: float = 0.0  # of the attention scores; 0 = head_dim ** -0.5
    logit_softcap: float = 0.0  # cap * tanh(logits / cap); 0 = none
    mrope_section: tuple[int, ...] = ()  # Qwen3-VL: frequencies of time, height and width
    experts: ExpertsConfig | None = None
    sliding: SlidingConfig | None = None
    gemma4: Gemma4Config | None = None

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return self.family != "llama"

    @property
    def is_gemma(self) -> bool:
        """Whether layers are Gemma's: norms on both sides of attention and MLP, GELU."""
        return self.family.startswith("gemma")

    @property
    def norm_offset(self) -> float:
        """What is added to every norm weight: Gemma 3 stores them less 1."""
        return 1.0 if self.family.startswith("gemma3") else 0.0

    @property
    def embed_scale(self) -> float:
        """Factor on the rows of the embedding."""
        return embed_scale(self.family, self.hidden_size)

    def slides(self, layer: int) -> bool:
        """Whether a layer has a sliding window."""
        return self.sliding is not None and self.sliding.layers[layer]

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def kv_size(self, layer: int) -> tuple[int, int]:
        """Key/value heads and head dimension of a layer."""
        if self.gemma4 is None or self.slides(layer):
            return self.num_kv_heads, self.head_dim
        return self.gemma4.global_kv_heads, self.gemma4.global_head_dim

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer sees: its own, or the last of its kind."""
        own = self.num_layers - (self.gemma4.shared_kv_layers if self.gemma4 else 0)
        if layer < own:
            return layer
        return max(i for i in range(own) if self.slides(i) == self.slides(layer))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], dtype: str, where: str = "config.json"):
        """Reads the fields of a Hugging Face config.

        Raises:
          UserError: if the model family, an activation, a bias or a RoPE kind is not covered.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise UserError(
                f"{where}: model_type {family!r} is not supported; targets are "
                f"{', '.join(FAMILIES)}"
            )
        if family in _COMPOSITE and not isinstance(config.get("text_config"), Mapping):
            raise UserError(f"{where}: field 'text_config' is missing")
        config = text_config(config)
        gemma = family.startswith("gemma")
        for key, wanted in (_GEMMA if gemma else _PLAIN).items():
            if config.get(key, wanted) not in (wanted, None):
                raise UserError(f"{where}: {key}={config[key]!r} is not supported")
        wanted = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        _require(config, (*wanted, "intermediate_size"), where)
        heads = config["num_attention_heads"]
        rope, local = ropes_from_hf(config, where)
        for each in (rope, local or rope):
            if each.partial_rotary_factor != 1.0 and each.kind != "proportional":
                raise UserError(
                    f"{where}: partial_rotary_factor={each.partial_rotary_factor} is not supported"
                )
        common = cls(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=rope,
            tie_embeddings=config.get("tie_word_embeddings", gemma),
            max_positions=config.get("max_position_embeddings", 2048),
            dtype=dtype,
        )
        if gemma:
            return _gemma(common, config, local, where)
        if family == "qwen3_moe":
            return dataclasses.replace(common, experts=_qwen3_experts(config, where))
        if family == "qwen3_vl":
            return dataclasses.replace(common, mrope_section=_mrope(config, common.head_dim, where))
        return common

    @classmethod
    def from_record(cls, value: Mapping[str, Any]) -> "TargetConfig":
        """Inverse of `dataclasses.asdict` after a trip through JSON.

        Raises:
          KeyError, TypeError: fields that are missing or unknown.
        """
        value = {key: tuple(x) if isinstance(x, list) else x for key, x in value.items()}
        value["rope"] = RopeConfig(**value["rope"])
        for name, kind in (
            ("experts", ExpertsConfig),
            ("sliding", SlidingConfig),
            ("gemma4", Gemma4Config),
        ):
            if (group := value.get(name)) is None:
                continue
            group = {key: tuple(x) if isinstance(x, list) else x for key, x in group.items()}
            if kind is SlidingConfig:
                group["rope"] = RopeConfig(**group["rope"])
            value[name] = kind(**group)
        return cls(**value)


def embed_scale(model_type: Any, hidden_size: int) -> float:
    """Factor on the rows of the embedding: Gemma's is the root of the hidden size."""
    return hidden_size**0.5 if str(model_type).startswith("gemma") else 1.0


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's fields of a config.json: its own, or those that a composite nests.

    With what released files leave out because it is the default of their class.
    """
    inner = config.get("text_config")
    text = dict(inner) if isinstance(inner, Mapping) else dict(config)
    for name in ("architectures", "quantization_config", "tie_word_embeddings"):
        if config.get(name) is not None:  # of the whole model
            text[name] = config[name]
    if str(config.get("model_type")).startswith("gemma3"):
        nested = isinstance(text.get("rope_parameters"), Mapping)
        for name, value in _GEMMA3_DEFAULTS.items():
            if text.get(name) is None and not (nested and name.startswith("rope")):
                text[name] = value
    return text


def _require(config: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    if missing := [name for name in names if config.get(name) is None]:
        raise UserError(f"{where}: field {missing[0]!r} is missing; is this a model's config?")


def _qwen3_experts(config: Mapping[str, Any], where: str) -> ExpertsConfig:
    count = config.get("num_experts") or config.get("num_local_experts")
    _require({"num_experts": count, **config}, ("num_experts",), where)
    _require(config, ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"), where)
    step, plain = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    return ExpertsConfig(
        count=count,
        per_token=config["num_experts_per_tok"],
        width=config["moe_intermediate_size"],
        normalise=config["norm_topk_prob"],
        dense_layers=tuple(i for i in layers if i in plain or (i + 1) % step),
    )


def _mrope(config: Mapping[str, Any], head_dim: int, where: str) -> tuple[int, ...]:
    nested = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    _require(nested, ("mrope_section",), where)
    section = tuple(nested["mrope_section"])
    if nested.get("mrope_interleaved") is not True:
        raise UserError(
            f"{where}: mrope_interleaved={nested.get('mrope_interleaved')!r} is not supported"
        )
    if len(section) != 3 or sum(section) != head_dim // 2:
        raise UserError(
            f"{where}: mrope_section={list(section)} are not three parts of the {head_dim // 2} "
            "frequencies of a head"
        )
    return section


def _gemma(
    common: TargetConfig, config: Mapping[str, Any], local: RopeConfig | None, where: str
) -> TargetConfig:
    """The options of Gemma 3 and 4."""
    is_3, count = common.family.startswith("gemma3"), common.num_layers
    allowed = (None, False) if is_3 else (None, "vision")  # tokens of text see the past only
    if config.get("use_bidirectional_attention") not in allowed:
        value = config["use_bidirectional_attention"]
        raise UserError(f"{where}: use_bidirectional_attention={value!r} is not supported")
    cap = config.get("final_logit_softcapping")
    if cap is not None and common.family == "gemma3":
        # transformers caps in Gemma3ForCausalLM and not in Gemma3ForConditionalGeneration.
        raise UserError(
            f"{where}: final_logit_softcapping={cap!r} beside a vision model is not supported: "
            "readers differ on whether it is applied"
        )
    kinds = config.get("layer_types")
    if kinds is None:
        step = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
        kinds = [
            "full_attention" if (i + 1) % step == 0 else "sliding_attention" for i in range(count)
        ]
    if len(kinds) != count or set(kinds) - {"full_attention", "sliding_attention"}:
        raise UserError(
            f"{where}: layer_types={kinds}; needs 'full_attention' or 'sliding_attention' for each "
            f"of {count} layers"
        )
    slides = tuple(kind == "sliding_attention" for kind in kinds)
    _require(config, ("sliding_window",), where)
    sliding = SlidingConfig(slides, config["sliding_window"], local or common.rope)
    if local is None:
        raise UserError(f"{where}: the RoPE of sliding layers is missing")
    common = dataclasses.replace(common, sliding=sliding, logit_softcap=float(cap or 0.0))
    if is_3:
        _require(config, ("query_pre_attn_scalar",), where)
        return dataclasses.replace(common, query_scale=config["query_pre_attn_scalar"] ** -0.5)
    experts = None
    if config.get("enable_moe_block"):
        _require(config, ("num_experts", "top_k_experts", "moe_intermediate_size"), where)
        width = config["moe_intermediate_size"]
        experts = ExpertsConfig(config["num_experts"], config["top_k_experts"], width, True)
    own = _gemma4(common, config, where)
    return dataclasses.replace(common, query_scale=1.0, experts=experts, gemma4=own)


def _gemma4(common: TargetConfig, config: Mapping[str, Any], where: str) -> Gemma4Config:
    slides, count = common.sliding.layers, common.num_layers
    if slides[-1]:
        raise UserError(f"{where}: layer_types: the last layer must be 'full_attention'")
    k_eq_v = bool(config.get("attention_k_eq_v"))
    sizes = {"head_dim": config.get("global_head_dim") or 512}
    if k_eq_v and config.get("num_global_key_value_heads"):
        sizes["num_key_value_heads"] = config["num_global_key_value_heads"]
    if (given := config.get("per_layer_config")) is not None:  # as transformers 5 saves them
        full = [dict(given.get(str(i)) or {}) for i in range(count) if not slides[i]]
        other = [key for i in range(count) if slides[i] for key in given.get(str(i)) or {}]
        sizes = full[0]
        odd = set(sizes) - {"head_dim", "num_key_value_heads"}
        if other or odd or any(each != sizes for each in full):
            raise UserError(
                f"{where}: per_layer_config={given!r} is not supported: only head_dim and "
                "num_key_value_heads, alike in all full_attention layers"
            )
    shared = config.get("num_kv_shared_layers") or 0
    if shared and set(slides[: count - shared]) != set(slides):
        raise UserError(
            f"{where}: num_kv_shared_layers={shared} leaves a kind of layer_types without keys and "
            "values of its own"
        )
    width = config.get("hidden_size_per_layer_input")
    width = 256 if width is None and "unified" not in common.family else width or 0
    vocab = config.get("vocab_size_per_layer_input") or 262144
    if width and vocab < common.vocab_size:
        raise UserError(
            f"{where}: vocab_size_per_layer_input={vocab} is less than vocab_size="
            f"{common.vocab_size}"
        )
    return Gemma4Config(
        global_head_dim=sizes.get("head_dim", common.head_dim),
        global_kv_heads=sizes.get("num_key_value_heads", common.num_kv_heads),
        k_eq_v=k_eq_v,
        shared_kv_layers=shared,
        double_wide_mlp=bool(config.get("use_double_wide_mlp")),
        per_layer_width=width,
        per_layer_vocab=vocab if width else 0,
    )
