"""What a drafter's config.json says, in whichever layout its writer used; strict, never guessing.

Reads the speculators layout (flags beside `transformer_layer_config`, layers counted from 1) and
the flat DeepSpec layout (`target_layer_ids`, counted from 0). A field may stand in any of the
sections that writers use. Two that disagree are an error, and so is an absent one whose default
differs between readers.
"""

import re
from pathlib import Path
from typing import Any

from dspark_jax.core.config import MARKOV_HEADS, DrafterConfig
from dspark_jax.core.errors import UserError, check_choice
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.layers import RopeConfig
from dspark_jax.models.rope_config import rope_from_hf
from dspark_jax.weights.safetensors import read_json

# Which class of the flat layout is which algorithm; the names are for the message.
_CLASSES = {"DSpark": "dspark", r"DFlash(?!2)": "dflash", "Eagle3Model$": "eagle3"}
_CLASS_NAMES = ("Qwen3DSparkModel", "DFlashDraftModel", "Qwen3Eagle3Model")
_SPECULATORS_MARKS = ("speculators_config", "speculators_version", "transformer_layer_config")
_SECTIONS = ("transformer_layer_config", "dflash_config", "dspark_config")
_ROPE_KEYS = {
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}


class DrafterFile:
    """config.json of a drafter, looked up in all the sections that writers use."""

    def __init__(self, path: Path):
        self.path = path
        self.value = read_json(path)
        self.sections = {"": self.value}
        for name in _SECTIONS:
            if name in self.value:
                self.sections[f"{name}."] = self.section(name)

    def section(self, *names: str) -> dict[str, Any]:
        """A nested object, empty if absent."""
        value: Any = self.value
        for name in names:
            value = value.get(name) or {}
            if not isinstance(value, dict):
                raise UserError(f"{self.path}: {'.'.join(names)} must be an object")
        return value

    def find(self, name: str, kind: type, places: dict[str, dict] | None = None) -> Any:
        """The value of a field wherever it stands; None if nowhere, an error if in dispute.

        `kind` float takes integers too, int no booleans and nothing negative.
        """
        found = {
            f"{section}{name}": values[name]
            for section, values in (places or self.sections).items()
            if values.get(name) is not None
        }
        for path, value in found.items():
            good = isinstance(value, (int, float) if kind is float else kind)
            good = good and (kind is bool or not isinstance(value, bool))
            if not good or (kind is int and value < 0):
                raise UserError(f"{self.path}: {path}={value!r}, which cannot be")
        return self.agreed(found)

    def require(self, name: str, kind: type, least: int = 0) -> Any:
        """The value of a field that has no default."""
        value = self.find(name, kind)
        if value is None:
            raise UserError(f"{self.path}: {name} is missing; add it, it is never guessed")
        if kind is int and value < least:
            raise UserError(f"{self.path}: {name}={value}, at least {least}")
        return value

    def agreed(self, found: dict[str, Any]) -> Any:
        """The one value of all paths, or None without any."""
        (path, value), *others = found.items() if found else [("", None)]
        for other, there in others:
            if there != value:
                raise UserError(f"{self.path}: {path}={value!r} but {other}={there!r}; keep one")
        return value


def detect(file: DrafterFile) -> tuple[str, str]:
    """The layout (speculators or deepspec) and the algorithm (dspark, dflash, ...) of a drafter.

    The speculators layout names its algorithm; the flat one, of DeepSpec and of z-lab's DFlash,
    has nothing but the name of a class.

    Raises:
      UserError: the config of something else.
    """
    algorithm = file.find("speculators_model_type", str, {"": file.value})
    if algorithm is not None:
        return "speculators", algorithm
    if marks := [name for name in _SPECULATORS_MARKS if name in file.value]:
        raise UserError(
            f"{file.path}: {marks[0]} is of the speculators layout, but speculators_model_type is "
            "missing; add it, it is never guessed"
        )
    classes = file.find("architectures", list, {"": file.value}) or []
    for pattern, algorithm in _CLASSES.items():
        if any(re.search(pattern, str(name)) for name in classes):
            return "deepspec", algorithm
    raise UserError(
        f"{file.path}: no drafter: neither a speculators_model_type nor a class of DeepSpec's "
        f"(architectures={classes!r}, not {', '.join(_CLASS_NAMES)})"
    )


def read_shape(file: DrafterFile) -> DrafterShape:
    """The shape of a DSpark or DFlash drafter; target_layers is 0 where the file does not tell.

    Raises:
      UserError: a field is absent, of the wrong kind or in dispute, or means a drafter that this
        package cannot express. By name.
    """
    layout, algorithm = detect(file)
    check_layers(file)
    rank, head, confidence, with_markov = _heads(file, algorithm)
    anchor = file.find("sample_from_anchor", bool)
    if anchor is None and layout == "deepspec":
        # The flat layout has no such field: DeepSpec's class is anchor-first, z-lab's fill-in.
        anchor = algorithm == "dspark"
    if anchor is None:
        raise UserError(
            f"{file.path}: sample_from_anchor is missing, which some readers take for true and "
            "some for false: add what the drafter was trained with"
        )
    vocab = file.require("vocab_size", int, 1)
    drafted = file.find("draft_vocab_size", int) or vocab
    if drafted > vocab:
        raise UserError(f"{file.path}: draft_vocab_size={drafted}, vocab_size={vocab}")
    target_layers = file.find("num_target_layers", int) or 0
    config = DrafterConfig(
        target_layer_ids=taps_of(file, target_layers),
        mask_token_id=file.require("mask_token_id", int),
        block_size=file.require("block_size", int, 1 if anchor else 2),
        num_layers=file.require("num_hidden_layers", int, 1),
        markov_head=head,
        markov_rank=rank,
        confidence_head=confidence,
        confidence_with_markov=with_markov,
        sample_from_anchor=anchor,
        vocab_size=0 if drafted == vocab else drafted,
        intermediate_size=file.require("intermediate_size", int, 1),
        num_heads=file.require("num_attention_heads", int, 1),
        num_kv_heads=file.require("num_key_value_heads", int, 1),
        head_dim=file.require("head_dim", int, 1),
        dtype="float32",
    )
    if config.mask_token_id >= vocab:
        raise UserError(f"{file.path}: mask_token_id={config.mask_token_id}, vocab_size={vocab}")
    _check_proposals(file, config)
    return complete(file, config, vocab, target_layers)


def complete(
    file: DrafterFile, config: DrafterConfig, vocab: int, target_layers: int
) -> DrafterShape:
    """The shape of a drafter of this config, with the sizes that are no options of its own."""
    positions = file.require("max_position_embeddings", int, 1)
    if config.num_heads % config.num_kv_heads:
        raise UserError(
            f"{file.path}: num_attention_heads={config.num_heads} is no multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )
    return DrafterShape(
        config=config,
        hidden_size=file.require("hidden_size", int, 1),
        vocab_size=vocab,
        target_layers=target_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=float(file.require("rms_norm_eps", float)),
        rope=_rope(file, positions),
        max_positions=positions,
        embed_scale=file.find("embed_scale", float) or 1.0,
        logit_softcap=float(file.find("final_logit_softcapping", float) or 0.0),
    )


def _check_proposals(file: DrafterFile, config: DrafterConfig) -> None:
    """An engine may be told to take fewer proposals than the block gives, never more."""
    methods = file.section("speculators_config").get("proposal_methods") or []
    for index, method in enumerate(methods):
        wanted = method.get("speculative_tokens") if isinstance(method, dict) else None
        if isinstance(wanted, int) and wanted > config.num_proposals:
            raise UserError(
                f"{file.path}: speculators_config.proposal_methods[{index}].speculative_tokens="
                f"{wanted}, but block_size={config.block_size} with sample_from_anchor="
                f"{config.sample_from_anchor} gives {config.num_proposals} proposals"
            )


def check_layers(file: DrafterFile, families: tuple[str, ...] = ("qwen3",)) -> str:
    """The family of the layers. Refuses what our drafter's cannot be, by the flag."""
    layers = file.section("transformer_layer_config") or file.value
    family = layers.get("model_type", "qwen3")
    if family not in families:
        raise UserError(f"{file.path}: model_type={family!r}; only {' or '.join(families)} layers")
    hidden = file.require("hidden_size", int)
    for name, fits in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("target_hidden_size", hidden),
    ):
        for section, values in file.sections.items():
            if values.get(name) not in (None, fits):
                raise UserError(
                    f"{file.path}: {section}{name}={values[name]!r} is not supported, only {fits!r}"
                )
    kinds, count = file.find("layer_types", list) or [], file.require("num_hidden_layers", int)
    if kinds and kinds != ["full_attention"] * count:
        raise UserError(
            f"{file.path}: layer_types={kinds}; only {count} (num_hidden_layers) times "
            "'full_attention' is supported"
        )
    return family


def _heads(file: DrafterFile, algorithm: str) -> tuple[int, str, bool, bool]:
    """Markov rank and head, confidence head, and whether that sees the Markov row.

    The rank decides whether there is a Markov head, not the name of the class: DeepSpec's DFlash
    drafters carry the DSpark class and rank 0.
    """
    if algorithm == "dflash":  # such files need not say that they have no heads
        rank = file.find("markov_rank", int) or 0
        confidence = file.find("enable_confidence_head", bool) or False
    else:
        rank = file.require("markov_rank", int)
        confidence = file.require("enable_confidence_head", bool)
    head = "none"
    if rank:
        head = file.require("markov_head_type", str)
        check_choice(f"{file.path}: markov_head_type", head, MARKOV_HEADS[1:])
    with_markov = False
    if confidence and rank:
        with_markov = file.require("confidence_head_with_markov", bool)
    elif confidence and file.find("confidence_head_with_markov", bool):
        raise UserError(f"{file.path}: confidence_head_with_markov=True, but markov_rank=0")
    return rank, head, confidence, with_markov


def taps_of(file: DrafterFile, target_layers: int) -> tuple[int, ...]:
    """Our 0-based layer ids from whichever convention the writer used.

    Whether they are layers of the target is seen here only where the file tells how many it has.
    """
    found = {}
    for name, offset in (
        ("aux_hidden_state_layer_ids", 1),
        ("eagle_aux_hidden_state_layer_ids", 1),
        ("target_layer_ids", 0),
    ):
        ids = file.find(name, list)
        if ids is not None:
            if not all(type(tap) is int and tap >= offset - 1 for tap in ids):
                raise UserError(f"{file.path}: {name}={ids}, which cannot be")
            if sorted(set(ids)) != ids:
                raise UserError(f"{file.path}: {name}={ids} does not ascend")
            if target_layers and any(tap - offset >= target_layers for tap in ids):
                raise UserError(f"{file.path}: {name}={ids}, but num_target_layers={target_layers}")
            found[f"{name} less {offset}"] = tuple(tap - offset for tap in ids)
    taps = file.agreed(found)
    if not taps:
        raise UserError(
            f"{file.path}: aux_hidden_state_layer_ids is missing; the tapped layers are never "
            "guessed"
        )
    return taps


def _rope(file: DrafterFile, positions: int) -> RopeConfig:
    """RoPE from wherever its writer put theta and the scaling; places that disagree are an error.

    theta alone, which our own exports mirror at the top, is no second scaling.
    """
    places, scalings = {}, {}
    for section, values in file.sections.items():
        places[section] = values
        for name in ("rope_parameters", "rope_scaling"):
            rope = values.get(name)
            if not isinstance(rope, dict):
                continue
            if unknown := sorted(set(rope) - _ROPE_KEYS):
                raise UserError(f"{file.path}: {section}{name}.{unknown[0]} is not supported")
            places[f"{section}{name}."] = rope
            kept = {key: rope[key] for key in rope if key not in ("rope_theta", "type")}
            kept["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
            scalings[f"{section}{name}"] = kept
    theta = file.find("rope_theta", float, places)
    if theta is None:
        raise UserError(f"{file.path}: rope_theta is missing; add it, it is never guessed")
    scaling = dict(file.agreed(scalings) or {"rope_type": "default"})
    if scaling["rope_type"] != "default" and scaling.get("factor") is None:
        raise UserError(f"{file.path}: rope_type {scaling['rope_type']!r} needs a factor")
    for name, kind in (
        ("partial_rotary_factor", float),
        ("original_max_position_embeddings", int),
    ):
        value = file.find(name, kind, places)
        if value is not None:
            scaling[name] = value
    flat = {"rope_theta": theta, "rope_parameters": scaling, "max_position_embeddings": positions}
    return rope_from_hf(flat, str(file.path))
