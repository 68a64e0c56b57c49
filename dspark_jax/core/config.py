"""Every option of a run as frozen dataclasses; config files hold the same names as plain values.

`from_mapping` turns the (ml_collections) mapping of a config file into `RunConfig` and refuses
unknown fields and wrong types by their dotted name.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from dspark_jax.core.errors import UserError, check_choice
from dspark_jax.core.loss_config import LossConfig
from dspark_jax.core.semantics import SEMANTICS, Experiment, completed

ALGORITHMS = ("dspark", "eagle3")
MARKOV_HEADS = ("none", "vanilla", "gated", "rnn")
REMATS = ("none", "layer", "dots")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices: `fsdp` shards batch and weights, `tp` heads, MLP and vocabulary. -1 = the rest.

    In training the target may run on target_fsdp x target_tp devices of its own, behind the
    drafter's; its taps then go from device to device. target_fsdp = 0: on the same devices.
    """

    fsdp: int = -1
    tp: int = 1
    target_fsdp: int = 0
    target_tp: int = 1

    def __post_init__(self) -> None:
        for name, least in (("fsdp", -1), ("tp", 1), ("target_fsdp", 0), ("target_tp", 1)):
            value = getattr(self, name)
            if value < least or (name == "fsdp" and value == 0):
                raise UserError(f"mesh.{name}={value}: a number of devices is needed")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Prompts, the responses the target gives to them, and how rows are cut.

    Attributes:
      prompts: file(s), hub id, "generator:N" or "magpie:N" (see data/prompts.py).
      limit: at most so many prompts (0 = all).
      path: folder of the prepared data set ("" = WORKDIR/data).
      temperature, top_p: of the responses; several `samples` are drawn per prompt.
      max_prompt_tokens: longer prompts are dropped, and counted.
      max_new_tokens: of one response.
      generation_batch: prompts decoded together.
      sequence_length: tokens of a packed training row.
      packing: False = one document a row, in batches of about the same length (data/batches.py).
      validation_fraction: share of documents kept for validation (chosen by hash of the row id).
    """

    prompts: str
    limit: int = 0
    path: str = ""
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    max_prompt_tokens: int = 256
    max_new_tokens: int = 256
    generation_batch: int = 32
    sequence_length: int = 512
    packing: bool = True
    validation_fraction: float = 0.05


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """What only EAGLE-3 drafters have (models/eagle3.py); the names are those of public files.

    Attributes:
      step_loss_decay: in training, step k of a chain weighs step_loss_decay ** k.
      qk_norm: per-head norms of queries and keys (Qwen3 layers); False = Llama layers.
      norm_before_residual: the residual stream starts from the normalised hidden state.
      norm_before_fc: one RMSNorm over the concatenated taps; fc_norm: one for each tap instead.
      norm_output: the next step is fed the state after the final norm (EAGLE-3.1), not before it.
    """

    step_loss_decay: float = 0.8
    qk_norm: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.step_loss_decay <= 1:
            raise UserError(
                f"drafter.eagle3.step_loss_decay={self.step_loss_decay}: above 0, at most 1"
            )
        if self.norm_before_fc and self.fc_norm:
            raise UserError("drafter.eagle3: norm_before_fc and fc_norm exclude each other")


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """The drafter's shape. Taps and mask id have no default: guessing them is a known fault.

    Attributes:
      algorithm: dspark (DFlash is the one without heads) or eagle3, which drafts a chain of
        `block_size` tokens with one layer and has no mask token (mask_token_id=-1), no Markov and
        no confidence head.
      target_layer_ids: tapped layers, 0-based: i = output of decoder layer i, -1 = embeddings.
      mask_token_id: row of the target's embedding fed to the slots after the anchor.
      block_size: slots of a block (gamma for anchor-first, gamma + 1 for fill-in).
      num_layers: decoder layers of the parallel backbone.
      markov_head: none, vanilla, gated or rnn; markov_rank its rank R.
      confidence_head: predict the acceptance of each slot; `confidence_with_markov` also shows it
        the previous token's Markov row; `confidence_detach` keeps its gradient from the backbone.
      sample_from_anchor: True = slot k proposes the token at anchor+k+1 (DSpark), False = fill-in,
        slot k proposes anchor+k and slot 0 nothing (original DFlash). One flag for labels,
        previous tokens, decay, decoding and export.
      vocab_size: tokens it can propose: the most frequent ones of the training data's responses,
        chosen when training begins and kept with the weights; 0 = the target's whole vocabulary.
      intermediate_size, num_heads, num_kv_heads, head_dim: 0 = the target's.
      init: "normal" = N(0, 0.02) everywhere (DeepSpec); "target" = layers and final norm start as
        the target's last ones (models/warm_start.py): much further in a short run.
      head_init: of the Markov and confidence heads: "normal" = N(0, 0.02), biases 0 (DeepSpec);
        "uniform" = W1 N(0, 0.01), every other weight and bias uniform within 1 / sqrt(inputs)
        (speculators).
      init_from: a drafter to start from instead: a run, a folder in the speculators or DeepSpec
        layout, or a hub id. Shape and flags must be these here; `init_new` names the heads that it
        has not and that start anew: confidence, markov or confidence+markov.
      dtype: compute dtype; parameters are always float32.
    """

    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 7
    num_layers: int = 5
    markov_head: str = "vanilla"
    markov_rank: int = 256
    confidence_head: bool = True
    confidence_with_markov: bool = True
    confidence_detach: bool = False
    sample_from_anchor: bool = True
    vocab_size: int = 0
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    init: str = "normal"
    head_init: str = "normal"
    init_from: str = ""
    init_new: str = ""
    dtype: str = "bfloat16"
    algorithm: str = "dspark"
    eagle3: Eagle3Config = Eagle3Config()

    def __post_init__(self) -> None:
        check_choice("drafter.algorithm", self.algorithm, ALGORITHMS)
        check_choice("drafter.markov_head", self.markov_head, MARKOV_HEADS)
        check_choice("drafter.init", self.init, ("normal", "target"))
        check_choice("drafter.head_init", self.head_init, ("normal", "uniform"))
        check_choice("drafter.dtype", self.dtype, ("float32", "bfloat16"))
        for part in filter(None, self.init_new.split("+")):
            check_choice("drafter.init_new", part, ("confidence", "markov"))
        if self.init_new and not self.init_from:
            raise UserError(f"drafter.init_new={self.init_new!r} needs drafter.init_from")
        if (self.markov_head == "none") != (self.markov_rank == 0):
            raise UserError(
                f"drafter.markov_head={self.markov_head!r} with drafter.markov_rank="
                f"{self.markov_rank}: use rank 0 with head 'none', a positive rank otherwise"
            )
        least = 1 if self.sample_from_anchor else 2
        if self.block_size < least:
            raise UserError(f"drafter.block_size={self.block_size}: at least {least}")
        if self.num_layers < 1:
            raise UserError(f"drafter.num_layers={self.num_layers}: at least 1")
        if self.algorithm == "eagle3":
            self._check_eagle3()
        elif self.eagle3 != Eagle3Config():
            raise UserError("drafter.eagle3 is set, but drafter.algorithm is not 'eagle3'")

    def _check_eagle3(self) -> None:
        """Nothing that EAGLE-3 lacks is silently ignored."""
        for name, fits in (
            ("mask_token_id", -1),
            ("markov_head", "none"),
            ("confidence_head", False),
            ("sample_from_anchor", True),
            ("num_layers", 1),  # the public layouts do not agree on what a second one sees
            ("init", "normal"),
        ):
            if getattr(self, name) != fits:
                raise UserError(
                    f"drafter.{name}={getattr(self, name)!r}: EAGLE-3 needs {fits!r} (the variant "
                    "'eagle3' of a config file sets all of its fields)"
                )

    @property
    def num_proposals(self) -> int:
        """Tokens proposed per round: every slot, or all but slot 0 in fill-in mode."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The optimizer recipe and the loop.

    Attributes:
      global_batch_size: packed rows per update, over all devices and accumulation steps.
      accumulation: micro-batches per update; the result does not depend on it.
      num_anchors: at most so many anchors per row.
      num_steps: updates; 0 = `num_epochs` over the data.
      loss_chunk: slots whose logits exist at once.
      remat: what the backward pass of a draft layer computes again to save memory: none; dots = all
        but the products with weights; layer = everything (models/remat.py).
      ema: decay of an exponential moving average of the weights, which is then what is validated,
        saved for use and exported; 0 = none. In the first updates it is (1 + n) / (10 + n).
      feature_memory_gb: host memory in which target features of training rows are kept, so that
        later epochs do not run the target again; 0 = always run it.
    """

    global_batch_size: int = 512
    accumulation: int = 1
    num_anchors: int = 512
    num_steps: int = 0
    num_epochs: int = 10
    learning_rate: float = 6e-4
    warmup_fraction: float = 0.04
    weight_decay: float = 0.0
    adam_b1: float = 0.9
    adam_b2: float = 0.999
    clip_norm: float = 1.0
    log_every: int = 10
    validate_every: int = 200
    checkpoint_every: int = 200
    keep_checkpoints: int = 2
    validation_rows: int = 16
    loss_chunk: int = 256
    feature_memory_gb: float = 0.0
    remat: str = "none"
    ema: float = 0.0

    def __post_init__(self) -> None:
        check_choice("train.remat", self.remat, REMATS)
        if not 0 <= self.ema < 1:
            raise UserError(f"train.ema={self.ema}: a decay such as 0.999, or 0 for none")


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Defaults of `evaluate` and `generate`; flags of those commands override them."""

    max_new_tokens: int = 128
    batch_size: int = 1
    prompts_per_set: int = 32
    prompts: str = "generator:32"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A whole run: what `configs/*.py` return, checked.

    `semantics` is the preset that some fields came from (core/semantics.py); the fields rule.
    `target_weights` = "int8" keeps the target's matrices in 8 bits (models/linear.py).
    `profile` measures the first steps and leaves a trace in WORKDIR/profile (training/profile.py).
    """

    target: str
    data: DataConfig
    drafter: DrafterConfig
    semantics: str = ""
    seed: int = 0
    target_dtype: str = "bfloat16"
    target_weights: str = ""
    profile: bool = False
    mesh: MeshConfig = MeshConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    def __post_init__(self) -> None:
        check_choice("semantics", self.semantics, ("", *SEMANTICS))
        check_choice("target_dtype", self.target_dtype, ("float32", "bfloat16"))
        check_choice("target_weights", self.target_weights, ("", "int8"))
        t = self.train
        if t.global_batch_size % t.accumulation:
            raise UserError(
                f"train.global_batch_size={t.global_batch_size} is not a multiple of "
                f"train.accumulation={t.accumulation}"
            )
        if self.drafter.algorithm == "eagle3":
            self._check_eagle3()

    def _check_eagle3(self) -> None:
        """Refuses what is defined for blocks alone: chains are not moved, nor cut otherwise."""
        if self.semantics:
            raise UserError(
                f"semantics={self.semantics!r}: presets are of DSpark and DFlash; leave it empty "
                "for EAGLE-3 and set fields of loss by themselves"
            )
        if self.drafter.head_init != "normal":
            raise UserError(
                f"drafter.head_init={self.drafter.head_init!r}: EAGLE-3 has neither of these heads"
            )
        if self.train.remat != "none":
            raise UserError(
                f"train.remat={self.train.remat!r}: EAGLE-3 always computes its steps again; leave "
                "it at 'none'"
            )
        for name in ("anchors", "supervision", "mask_at", "cross_documents"):
            value, fits = getattr(self.loss, name), getattr(LossConfig(), name)
            if value != fits:
                raise UserError(
                    f"loss.{name}={value!r}: EAGLE-3 needs {fits!r}; only the blocks of DSpark and "
                    "DFlash are supervised otherwise"
                )


def from_mapping(cls: type, mapping: Mapping[str, Any], prefix: str = "config") -> Any:
    """Builds the dataclass `cls` from nested mappings, without any silent cast.

    Integers are taken where floats are asked for and lists where tuples are; nothing else is
    converted.

    Raises:
      UserError: naming the dotted field that is unknown, missing or of the wrong type.
    """
    mapping = completed(mapping) if cls is RunConfig else mapping
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(mapping) - set(fields))
    if unknown:
        raise UserError(f"{prefix}.{unknown[0]}: no such field; there are {', '.join(fields)}")
    values = {}
    for name, field in fields.items():
        if name not in mapping:
            if field.default is dataclasses.MISSING:
                raise UserError(f"{prefix}.{name} is required: set it in the config file")
            continue
        values[name] = _checked(hints[name], mapping[name], f"{prefix}.{name}")
    return cls(**values)


def _checked(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise UserError(f"{name}={value!r}: must be a group of fields")
        return from_mapping(hint, value, name)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return None if value is None else _checked(options[0], value, name)
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            raise UserError(f"{name}={value!r}: must be a tuple")
        return tuple(_checked(typing.get_args(hint)[0], item, name) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{name}={value!r}: must be {hint.__name__}, is {type(value).__name__}")
    return value


def default_config() -> Experiment:
    """What a config file starts from: every field that has a default, so all can be overridden."""
    return Experiment(_defaults(RunConfig))


def _defaults(cls: type) -> dict[str, Any]:
    hints, values = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = _defaults(hints[field.name])
        elif field.default is not dataclasses.MISSING:
            values[field.name] = field.default
    return values


def to_mapping(config: Any) -> dict[str, Any]:
    """The dataclass as nested plain values, for WORKDIR/config.json."""
    return dataclasses.asdict(config)
