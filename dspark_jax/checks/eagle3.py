"""EAGLE-3 drafters: what only they have, and what vLLM, SGLang and tpu-inference take of them.

A chain has no block, no mask token, no Markov head and no confidence head, so nothing of those is
asked. What the other files find of layer ids, sizes, dtypes, vocabularies and the target holds for
it as well. As read in vLLM 0.32.0 and in the sources of SGLang and tpu-inference of mid-2026; the
comments name the place.
"""

from collections.abc import Callable, Iterator

from dspark_jax.checks import engines
from dspark_jax.checks.facts import (
    REFUSE,
    WARN,
    DrafterFacts,
    Finding,
    TargetFacts,
)
from dspark_jax.checks.target import recipe_of
from dspark_jax.checks.weights import BORROWED

_CONFIG = "config.json"
_IDS = "eagle_aux_hidden_state_layer_ids"
# What vLLM takes where a flag is not at the top (configs/speculators/algos.py, update_eagle3).
_VLLM_FLAGS = {
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
# Of the targets known here, those whose class in vLLM hands out the states of its layers (class
# SupportsEagle3 in model_executor/models/interfaces.py). Gemma 3 has none.
_VLLM_TARGETS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_vl", "gemma4")


def check_flags(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """The norms that are options: readers put different values in place of one that is absent."""
    recipe = recipe_of(drafter).get("eagle3")
    trained = recipe if isinstance(recipe, dict) else {}
    disputed = {finding.where for finding in drafter.problems}
    for name, filled in _VLLM_FLAGS.items():
        said, where = drafter.said[name], f"{_CONFIG}: {name}"
        if drafter.layout == "deepspec":  # its class has none of these norms
            said = False
        elif said is None and name == "norm_before_residual" and where not in disputed:
            why = "missing; speculators takes that for false, vLLM for true"
            yield Finding(REFUSE, "norm flag", where, why, "write what it was trained with")
            continue
        elif said not in (None, filled) and drafter.file.value.get(name) is None:
            why = f"not at the top of {_CONFIG}, where alone vLLM looks: it would take {filled}"
            yield Finding(REFUSE, "norm flag", where, why, "write it at the top")
        if name in trained and where not in disputed and bool(said) != trained[name]:
            why = f"{said}, trained with {trained[name]}"
            remedy = f"{_CONFIG} was changed after the export: restore it"
            yield Finding(REFUSE, "recipe", where, why, remedy)
    if "qk_norm" in trained and (drafter.family != "llama") != trained["qk_norm"]:
        why = f"{drafter.family!r}, trained with qk_norm={trained['qk_norm']}"
        remedy = "write qwen3 for layers that norm queries and keys, else llama"
        yield Finding(REFUSE, "recipe", f"{_CONFIG}: model_type", why, remedy)


def check_chain(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """How many tokens are drafted per round; a chain has no length of its own."""
    if drafter.layout == "deepspec":
        return
    where = "speculators_config.proposal_methods"
    methods = drafter.file.value.get("speculators_config")
    methods = methods.get("proposal_methods") if isinstance(methods, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    wanted = first.get("speculative_tokens") if isinstance(first, dict) else None
    trained = recipe_of(drafter).get("block_size")
    if type(wanted) is not int or wanted < 1:
        why = f"speculative_tokens={wanted!r}: how many tokens are drafted is nowhere else"
        yield Finding(REFUSE, "proposals", where, why, "write the length it was trained with")
    elif type(trained) is int and wanted > trained:
        why = f"speculative_tokens={wanted}, but it was trained to unroll {trained} steps"
        remedy = f"write {trained}, or measure what the later steps are worth"
        yield Finding(WARN, "proposals", where, why, remedy)


def check_shared(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """Embedding and LM head belong into its files; some readers need them there."""
    # vLLM shares the target's instead (v1/spec_decode/llm_base_proposer.py). speculators 0.9 lists
    # the embedding as one that may be missing and leaves what lay in that memory
    # (models/eagle3/core.py); without the head it starts a random one.
    pruned = drafter.drafted != drafter.said["vocab_size"]
    for name in BORROWED if drafter.tensors else ():
        if name in drafter.tensors or (pruned and name == "lm_head.weight"):
            continue  # a pruned head that is missing: check_draft_vocabulary
        what = "embedding" if name == "embed_tokens.weight" else "LM head"
        why = f"missing: vLLM takes the target's, speculators drafts with an untrained {what}"
        remedy = "export again, or copy it from the target"
        yield Finding(WARN, "shared tensor", f"weights: {name}", why, remedy)


def check_layout(drafter: DrafterFacts, target: TargetFacts, engine: str) -> Iterator[Finding]:
    """Whether the engine has a class for this layout, and finds the layers in it."""
    remedy = "write the speculators layout and serve with vLLM"
    if drafter.layout == "deepspec":
        # Tried (tests/peers/test_vllm_dspark.py): "Model architectures ['Qwen3Eagle3Model'] are not
        # supported for now" by vLLM, whose config tpu-inference builds on. The one class in
        # SGLang's models/llama_eagle3.py is LlamaForCausalLMEagle3.
        why = f"{drafter.file.value.get('architectures')}: {engine} has no class for DeepSpec's "
        why += "EAGLE-3, which DeepSpec alone runs"
        yield Finding(REFUSE, "layout", f"{_CONFIG}: architectures", why, remedy)
    elif engine == "sglang":
        # models/llama_eagle3.py: a flat config, Llama layers, tensors under midlayer.
        why = "speculators layout: SGLang takes EAGLE-3 in a flat config of the class "
        why += "LlamaForCausalLMEagle3, which is not written here"
        yield Finding(REFUSE, "layout", _CONFIG, why, "serve with vLLM")
    elif engine == "tpu-inference" and drafter.family != "llama":
        # It has the config from vLLM, and so the class Eagle3Qwen3ForCausalLM, which its
        # models/common/model_loader.py does not know.
        why = f"{drafter.family!r}: tpu-inference has EAGLE-3 with Llama layers only"
        yield Finding(REFUSE, "layout", f"{_CONFIG}: model_type", why, "serve with vLLM")
    elif engine == "tpu-inference":
        # models/jax/llama_eagle3.py, load_weights: its table of names.
        why = "layers.0.*: tpu-inference looks for these tensors under midlayer.*"
        yield Finding(REFUSE, "layout", "weights", why, "serve with vLLM")
    elif drafter.taps and _IDS not in drafter.taps:
        # algos.py hands on this field and no other; else the target's class chooses.
        why = "missing; vLLM would take the target's default taps"
        remedy = "write there each id of target_layer_ids plus 1"
        yield Finding(REFUSE, "layer ids", f"{_CONFIG}: {_IDS}", why, remedy)


def check_fusion(drafter: DrafterFacts, target: TargetFacts, engine: str) -> Iterator[Finding]:
    """For how many taps the engine builds `fc`, and which norms before it it has."""
    count = len(next(iter(drafter.taps.values()), []))
    if drafter.layout == "deepspec" or not count:
        return
    if engine == "tpu-inference" and count != 3:  # models/jax/llama_eagle3.py: fc
        why = f"{count} taps: tpu-inference builds fc for three"
        yield Finding(REFUSE, "layer ids", f"{_CONFIG}: {_IDS}", why, "train with three taps")
    if engine == "tpu-inference":
        for name in ("norm_before_fc", "fc_norm", "norm_output"):
            if drafter.said[name]:
                why = "true: tpu-inference has no such norm"
                yield Finding(REFUSE, "norm flag", f"{_CONFIG}: {name}", why, "serve with vLLM")
    if engine != "vllm":
        return
    # models/qwen3_eagle3.py and llama_eagle3.py, which see transformer_layer_config only; Llama
    # layers do not look at the ids.
    layers = drafter.file.sections.get("transformer_layer_config.", {})
    names = ("num_aux_hidden_states",)
    if drafter.family != "llama":
        names = ("num_aux_layers", *names)
    said = next((layers[name] for name in names if layers.get(name) is not None), None)
    built = said if said is not None else 3 if drafter.family == "llama" else count
    if built != count:
        why = f"{said or 'missing'}: vLLM builds fc for {built} taps, {_CONFIG} lists {count}"
        where = f"{_CONFIG}: num_aux_hidden_states"
        remedy = f"write {count} into transformer_layer_config"
        yield Finding(REFUSE, "layer ids", where, why, remedy)


def check_target(drafter: DrafterFacts, target: TargetFacts, engine: str) -> Iterator[Finding]:
    """Whether the engine can tap this target."""
    family = str(target.config.get("model_type"))
    if engine == "vllm" and not family.startswith(_VLLM_TARGETS):
        why = f"{family!r}: vLLM may be unable to tap the layers of this target"
        remedy = "try it there before relying on it"
        yield Finding(WARN, "target family", "target's config.json: model_type", why, remedy)


CHECKS: tuple[Callable[[DrafterFacts, TargetFacts], Iterator[Finding]], ...] = (
    check_flags,
    check_chain,
    check_shared,
)
ENGINE_CHECKS: tuple[Callable[[DrafterFacts, TargetFacts, str], Iterator[Finding]], ...] = (
    check_layout,
    check_fusion,
    check_target,
    engines.check_own_tables,
    engines.check_scales,
)
