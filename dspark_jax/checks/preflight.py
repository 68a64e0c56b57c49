"""Does this drafter fit this target in this engine? Every check is from facts to findings.

Verification repairs what a wrong drafter proposes, so most of these faults show only as a low
accepted length. Here is what config.json says of the drafter and its target; the tensors are
judged in weights.py, whether this is the target trained with in target.py, and what an engine
accepts in engines.py; what only EAGLE-3 has, in eagle3.py. `preflight` runs them all.
"""

import copy
from collections.abc import Callable, Iterator

from dspark_jax.checks import eagle3, engines
from dspark_jax.checks import target as targets
from dspark_jax.checks import weights as tensors
from dspark_jax.checks.facts import (
    REFUSE,
    SIZES,
    TAP_OFFSETS,
    WARN,
    DataFacts,
    DrafterFacts,
    Finding,
    TargetFacts,
)
from dspark_jax.core.errors import UserError
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.layers import RopeConfig
from dspark_jax.weights.compare import ROPE_FIELDS
from dspark_jax.weights.drafter_file import DrafterFile, read_shape
from dspark_jax.weights.eagle3_file import read_eagle3_shape

_CONFIG = "config.json"
# What has a check of its own is made harmless before the strict reader sees the rest.
_HARMLESS = {
    "speculators_model_type": "dspark",
    "sample_from_anchor": True,
    "block_size": 1,
    "mask_token_id": 0,
    "aux_hidden_state_layer_ids": [1],
    "markov_rank": 0,
    "enable_confidence_head": False,
}
_HARMLESS_EAGLE3 = {
    "speculators": {
        "speculators_model_type": "eagle3",
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 1}]},
        "eagle_aux_hidden_state_layer_ids": [1],
        "norm_before_residual": False,
        "draft_vocab_size": 1,
    },
    "deepspec": {
        "architectures": ["Qwen3Eagle3Model"],
        "target_layer_ids": [0],
        "ttt_length": 1,
        "step_loss_decay": 1.0,
    },
}
_OWN = {*_HARMLESS, *TAP_OFFSETS, "speculators_config", "draft_vocab_size", "target_hidden_size"}
_OWN |= {"layer_types", "use_sliding_window", "markov_head_type", "confidence_head_with_markov"}
_OWN_EAGLE3 = {name for values in _HARMLESS_EAGLE3.values() for name in values}
_OWN_EAGLE3 |= {*TAP_OFFSETS, "target_hidden_size", "embed_requires_grad", "num_target_layers"}
# Beside SIZES, by kind; a DFlash file need not say that it has no heads.
_ASKED = {
    "dspark": ("block_size", "mask_token_id", "markov_rank", "enable_confidence_head"),
    "dflash": ("block_size", "mask_token_id"),
    "eagle3": (),
}


def preflight(
    drafter: DrafterFacts, target: TargetFacts, engine: str, data: DataFacts | None = None
) -> list[Finding]:
    """All that speaks against serving this drafter with this target in this engine; refusals first.

    Args:
      engine: one of `engines.ENGINES`.
      data: of the training data, if it is at hand.
    """
    findings = [*drafter.problems, *target.problems]
    if not drafter.kind:
        said = drafter.file.value.get("speculators_model_type")
        classes = drafter.file.value.get("architectures")
        why = f"speculators_model_type={said!r}, architectures={classes!r}: neither DSpark nor "
        why += "DFlash; an engine that does not know the type serves without speculation"
        remedy = "correct the name; no other kind is judged here, nothing else was checked"
        if "Eagle3" in str(classes):
            why = f"{classes}: of EAGLE-3, the speculators layout and DeepSpec's class "
            why += "Qwen3Eagle3Model are judged here"
            remedy = "nothing else was checked; compare by hand"
        return [Finding(REFUSE, "kind of drafter", _CONFIG, why, remedy), *findings]
    chain = drafter.kind == "eagle3"
    checks = (*(c for c in CHECKS if c not in BLOCKS), *eagle3.CHECKS) if chain else CHECKS
    for check in checks:
        findings += check(drafter, target)
    for check in eagle3.ENGINE_CHECKS if chain else engines.CHECKS:
        findings += check(drafter, target, engine)
    if data is None:
        findings += check_mask_unseen(drafter, target)
    else:
        findings += targets.check_data(drafter, target, data)
    return sorted(findings, key=lambda finding: finding.severity != REFUSE)


def check_sizes(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """Sizes that are absent, or not the target's where the two share tensors."""
    disputed = {finding.where for finding in drafter.problems}
    asked = (*SIZES, *_ASKED[drafter.kind])
    if drafter.kind == "eagle3":
        asked += ("ttt_length",) if drafter.layout == "deepspec" else ("draft_vocab_size",)
    for name in asked:
        if drafter.said[name] is None and f"{_CONFIG}: {name}" not in disputed:
            why = "missing; readers put different values, or zero, in its place"
            yield Finding(REFUSE, "missing field", f"{_CONFIG}: {name}", why, "add what it was")
    theirs = target.config["hidden_size"]
    for name in ("hidden_size", "target_hidden_size"):
        said = drafter.said[name]
        if said not in (None, theirs):
            why = f"{said}, the target's is {theirs}; embedding and LM head are shared"
            yield Finding(REFUSE, "hidden size", f"{_CONFIG}: {name}", why, "use its own target")
    said, theirs = drafter.said["vocab_size"], target.config["vocab_size"]
    if said not in (None, theirs):
        why = f"{said}, the target's is {theirs}; tokens go in by the target's ids"
        pruned = said < theirs and said == drafter.drafted
        remedy = "write the target's, and this one as draft_vocab_size" if pruned else ""
        remedy = remedy or "use the target it was trained with"
        yield Finding(REFUSE, "vocabulary size", f"{_CONFIG}: vocab_size", why, remedy)


def check_layers(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """Everything else that the reader of an import refuses: RoPE in dispute, biases, activation."""
    if drafter.kind and all(drafter.said[name] is not None for name in SIZES):
        try:
            backbone(drafter)
        except UserError as error:
            why = str(error).removeprefix(f"{drafter.file.path}: ")
            remedy = "repair it; if it was trained so, judge by hand: only Qwen3 layers without "
            remedy += "biases are known here"
            remedy += ", Llama ones of EAGLE-3" if drafter.kind == "eagle3" else ""
            yield Finding(REFUSE, "draft layers", _CONFIG, why, remedy)


def backbone(drafter: DrafterFacts) -> DrafterShape:
    """Sizes and RoPE of the draft layers, from the strict reader.

    Raises:
      UserError: its words.
    """
    rest: DrafterFile = copy.copy(drafter.file)
    own, harmless, read = _OWN, _HARMLESS, read_shape
    if drafter.kind == "eagle3":
        own, harmless, read = _OWN_EAGLE3, _HARMLESS_EAGLE3[drafter.layout], read_eagle3_shape
    rest.sections = {
        section: {name: value for name, value in values.items() if name not in own}
        for section, values in drafter.file.sections.items()
    }
    rest.sections[""] = rest.value = rest.sections[""] | harmless
    return read(rest)


def check_rope(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """RoPE other than the target's; engines rotate by the drafter's own."""
    try:
        ours = backbone(drafter).rope
    except UserError:
        return  # named by check_layers or check_sizes
    if other := rope_differences(ours, target.rope):
        why = f"{', '.join(other)}: right only if it was trained so"
        remedy = "if not, copy rope_parameters and rope_theta from the target's config.json"
        yield Finding(WARN, "RoPE", f"{_CONFIG}: rope_parameters", why, remedy)


def rope_differences(ours: RopeConfig, theirs: RopeConfig | None) -> list[str]:
    """What turns otherwise than in the target, in words; nothing if its RoPE is unknown."""
    if theirs is None:
        return []
    fields = ["theta", "kind", "partial_rotary_factor"]
    fields += ROPE_FIELDS[ours.kind] if ours.kind == theirs.kind else ()
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in fields]
    return [f"{name} {a!r} (target {b!r})" for name, a, b in pairs if a != b]


def check_anchor(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """The flag that says which token a slot predicts, and the number of proposals it implies."""
    where, block = f"{_CONFIG}: sample_from_anchor", drafter.said["block_size"]
    if drafter.anchor_first is None:
        why = "missing; vLLM takes that for false, other readers for true: every slot one off"
        remedy = "write true if slot k was trained on the token at anchor + k + 1, else false"
        yield Finding(REFUSE, "anchor flag", where, why, remedy)
    methods = drafter.file.value.get("speculators_config")
    methods = methods.get("proposal_methods") if isinstance(methods, dict) else None
    if drafter.layout == "deepspec" or drafter.proposals is None:
        return
    where = "speculators_config.proposal_methods"
    first = methods[0] if isinstance(methods, list) and methods else None
    wanted = first.get("speculative_tokens") if isinstance(first, dict) else None
    gives = f"block_size={block}, sample_from_anchor={drafter.anchor_first} gives"
    if type(wanted) is not int or wanted < 1:
        why = f"speculative_tokens={wanted!r}; {gives} {drafter.proposals}"
        yield Finding(REFUSE, "proposals", where, why, f"write {drafter.proposals}")
    elif wanted > drafter.proposals:
        why = f"speculative_tokens={wanted}, but {gives} {drafter.proposals}"
        remedy = f"write {drafter.proposals}, or the flag it was trained with"
        yield Finding(REFUSE, "proposals", where, why, remedy)
    elif drafter.anchor_first and wanted == drafter.proposals - 1:
        why = f"speculative_tokens={wanted}, which is what fill-in gives; {gives} one more"
        remedy = f"write {drafter.proposals}; if it was trained as fill-in, write the flag as false"
        yield Finding(WARN, "proposals", where, why, remedy)


def check_layer_ids(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """The tapped layers: their convention, their range, and how many `fc` was trained for."""
    found = drafter.taps
    if not found:
        field = "aux_hidden_state_layer_ids"
        field = f"eagle_{field}" if drafter.kind == "eagle3" else field
        why = f"no usable {field} or target_layer_ids; engines would guess them"
        remedy = f"add what it was trained with ({field} counts from 1)"
        yield Finding(REFUSE, "layer ids", _CONFIG, why, remedy)
        return
    (name, taps), *others = found.items()
    for other, there in others:
        if there != taps:
            why = f"{name} means layers {taps} (from 0), {other} {there}; they count from "
            why += f"{TAP_OFFSETS[name]} and {TAP_OFFSETS[other]}"
            yield Finding(REFUSE, "layer id offset", f"{_CONFIG}: {other}", why, "keep one")
    where = f"{_CONFIG}: {name}"
    last, outside = target.layers - 1, [t for t in taps if not -1 <= t < target.layers]
    if outside:
        why = f"{outside} (from 0) of a target with layers 0 to {last}"
        remedy = "use its own target; if the writer counted otherwise, mind the offset of 1"
        yield Finding(REFUSE, "layer ids", where, why, remedy)
    if last in taps:
        why = f"{last} (from 0) is the last: engines differ on whether the final norm is in it"
        yield Finding(REFUSE, "last layer", where, why, f"train with layers up to {last - 1}")
    if taps != sorted(set(taps)):
        why = f"{taps} (from 0) must be strictly increasing; engines collect them in that order"
        yield Finding(REFUSE, "layer ids", where, why, "list them as they were trained with")
    if -1 in taps and TAP_OFFSETS[name]:
        why = "0 is the embedding's output under this name, which counts layers that have run"
        yield Finding(WARN, "layer id offset", where, why, "if layer 0 was meant, add 1 to each")
    count = drafter.said["num_target_layers"]
    if count not in (None, target.layers):
        why = f"{count}, the target has {target.layers}"
        where = f"{_CONFIG}: num_target_layers"
        yield Finding(REFUSE, "target depth", where, why, "use its own target")
    fc, hidden = drafter.tensors.get("fc.weight"), drafter.said["hidden_size"]
    if fc and hidden and len(fc.shape) == 2 and fc.shape[1] != hidden * len(taps):
        why = f"{list(fc.shape)} takes {fc.shape[1] / hidden:g} taps, {_CONFIG} lists {len(taps)}"
        remedy = "list the layers it was trained with; never cut the matrix"
        yield Finding(REFUSE, "layer ids", "weights: fc.weight", why, remedy)


def check_mask(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """The mask token must have a row in the embedding and no other use."""
    mask, where = drafter.said["mask_token_id"], f"{_CONFIG}: mask_token_id"
    if mask is None:
        return
    remedy = "it cannot be changed after training: train with an unused id, or use its own target"
    if mask >= target.embed_rows:
        why = f"{mask} has no row in the target's embedding of {target.embed_rows} rows"
        yield Finding(REFUSE, "mask id", where, why, remedy)
    elif mask in target.roles:
        why = f"{mask} is the target's {target.roles[mask]} token"
        yield Finding(REFUSE, "mask id", where, why, remedy)
    elif target.tokens.get(mask, "") and target.tokens[mask] in target.template:
        why = f"{mask} is {target.tokens[mask]!r}, which the chat template writes"
        yield Finding(REFUSE, "mask id", where, why, remedy)


def check_mask_unseen(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """Without training data: whether the mask token could occur in them."""
    mask, where = drafter.said["mask_token_id"], f"{_CONFIG}: mask_token_id"
    if mask is not None and mask < target.token_count and mask not in target.tokens:
        why = f"{mask} is an ordinary token of the target, which texts may contain"
        remedy = "give --data=WORKDIR/data to see whether it occurs; better an unused id"
        yield Finding(WARN, "mask id", where, why, remedy)


CHECKS: tuple[Callable[[DrafterFacts, TargetFacts], Iterator[Finding]], ...] = (
    check_sizes,
    check_layers,
    check_rope,
    check_anchor,
    check_layer_ids,
    check_mask,
    tensors.check_heads,
    tensors.check_tensors,
    tensors.check_dtypes,
    tensors.check_draft_vocabulary,
    targets.check_record,
    targets.check_recipe,
    targets.check_verifier,
    targets.check_tokenizer,
)
# Of these, what EAGLE-3 has not.
BLOCKS = (check_anchor, check_mask, tensors.check_heads)
