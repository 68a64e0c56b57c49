"""What vLLM, SGLang and tpu-inference take of a drafter, and what each would silently do otherwise.

As read in vLLM 0.32.0 and in the sources of SGLang and tpu-inference of mid-2026; the comments name
the place. Engines move: a refusal here is a reason to look there again.
"""

from collections.abc import Callable, Iterator

from dspark_jax.checks.facts import (
    REFUSE,
    WARN,
    DrafterFacts,
    Finding,
    TargetFacts,
)
from dspark_jax.checks.weights import BORROWED, borrowed_rows_agree, stored_head
from dspark_jax.models.target_config import embed_scale

ENGINES = ("vllm", "sglang", "tpu-inference")
_CONFIG = "config.json"
# Classes for which vLLM builds a standalone DSpark drafter (config/speculative.py); any other class
# with "DSpark" in it is taken for DeepSeek-V4's, whose weights lie in the target.
_VLLM_DSPARK = ("Qwen3DSparkModel", "Qwen3OmniDSparkModel", "Gemma4DSparkModel", "DSparkDraftModel")


def check_layout(drafter: DrafterFacts, target: TargetFacts, engine: str) -> Iterator[Finding]:
    """Whether the engine finds the fields where this layout puts them, or would fill in its own."""
    value, names = drafter.file.value, set(drafter.taps)
    if engine == "sglang" and drafter.layout == "speculators":
        # SGLang reads the flat config of the DeepSpec layout (speculators#753, sglang#34734).
        why = "speculators layout: SGLang looks for sizes, target_layer_ids and class at the top"
        remedy = "write the DeepSpec layout: flat config, class Qwen3DSparkModel, layers from 0"
        yield Finding(REFUSE, "layout", _CONFIG, why, remedy)
    elif engine == "sglang" and names and "target_layer_ids" not in names:
        why = "no target_layer_ids: SGLang would spread the taps by the number of draft layers"
        remedy = "write target_layer_ids, counted from 0"
        yield Finding(REFUSE, "layer ids", f"{_CONFIG}: target_layer_ids", why, remedy)
    elif drafter.layout == "speculators" and names and "aux_hidden_state_layer_ids" not in names:
        # vLLM's algos.py reads aux_hidden_state_layer_ids and no other; tpu-inference by vLLM.
        why = "missing; this layout has its layer ids there, counted from 1"
        remedy = "write there each id of target_layer_ids plus 1"
        where = f"{_CONFIG}: aux_hidden_state_layer_ids"
        yield Finding(REFUSE, "layer ids", where, why, remedy)
    elif engine == "vllm" and drafter.layout == "deepspec":
        if names == {"aux_hidden_state_layer_ids"}:  # eagle3_utils.py: not among the names tried
            why = "no target_layer_ids: in a flat config vLLM would take the target's default taps"
            remedy = "write target_layer_ids, counted from 0"
            yield Finding(REFUSE, "layer ids", f"{_CONFIG}: target_layer_ids", why, remedy)
        classes = value.get("architectures") or []
        if drafter.kind == "dspark" and not set(classes) & set(_VLLM_DSPARK):
            why = f"{classes}: vLLM takes it for the drafter inside DeepSeek-V4's own weights"
            where = f"{_CONFIG}: architectures"
            yield Finding(REFUSE, "layout", where, why, "write Qwen3DSparkModel")
    elif engine == "tpu-inference" and drafter.layout == "deepspec":
        # models/jax/qwen3_dflash.py, spec_decode/jax/dflash.py: dflash_config or a default.
        nested = value.get("dflash_config")
        nested = nested if isinstance(nested, dict) else {}
        for name, filled in (("mask_token_id", "0"), ("target_layer_ids", "evenly spread layers")):
            if nested.get(name) is None:
                why = f"missing in dflash_config; tpu-inference would take {filled}"
                where = f"{_CONFIG}: dflash_config.{name}"
                yield Finding(REFUSE, "layout", where, why, "write it there as well")


def check_kind(drafter: DrafterFacts, target: TargetFacts, engine: str) -> Iterator[Finding]:
    """Heads that the engine has no code for, and the layout of its block."""
    head, where = drafter.head, f"{_CONFIG}: markov_head_type"
    heads = {head, stored_head(drafter)}
    if engine == "vllm" and heads & {"gated", "rnn"}:
        # qwen3_dspark.py: DSparkMarkovHead has only W1 and W2.
        why = "vLLM reads only vanilla heads; this one would load and draft wrongly"
        remedy = "serve with SGLang, or train a vanilla head"
        yield Finding(REFUSE, "head not servable", where, why, remedy)
    if engine == "tpu-inference" and (drafter.kind == "dspark" or heads - {"none", None}):
        why = "tpu-inference serves DFlash and EAGLE-3 drafters; it has no DSpark"
        remedy = "serve with vLLM or SGLang, or train with rank 0, no confidence head and fill-in"
        yield Finding(REFUSE, "head not servable", _CONFIG, why, remedy)
    elif engine != "tpu-inference" and drafter.kind == "dspark" and head == "none":
        # vLLM: zero-wide head (vllm#49646); SGLang: "DSpark requires markov_rank > 0".
        why = "markov_rank is 0: vLLM and SGLang run that only as DFlash, which is fill-in"
        remedy = "train with sample_from_anchor=False and no confidence head, or with a rank"
        yield Finding(REFUSE, "head not servable", f"{_CONFIG}: markov_rank", why, remedy)
    if drafter.kind == "dflash" and drafter.anchor_first:
        # vLLM's GPU runner refuses it, its CPU runner overlooks it; tpu-inference samples from slot
        # 1 on; SGLang samples the anchor's slot only in DSpark (sglang-jax#1619).
        why = "true, but engines run DFlash as fill-in: every proposal would be one position off"
        remedy = "train with sample_from_anchor=False"
        yield Finding(REFUSE, "anchor flag", f"{_CONFIG}: sample_from_anchor", why, remedy)
    if engine == "tpu-inference" and target.config.get("model_type") not in ("qwen3", "llama"):
        why = f"{target.config.get('model_type')!r}; tpu-inference taps Qwen3 and Llama targets"
        where = "target's config.json: model_type"
        yield Finding(WARN, "target family", where, why, "try it there before relying on it")


def check_layer_types(drafter: DrafterFacts, target: TargetFacts, engine: str) -> Iterator[Finding]:
    """Sliding layers: complete, with a window, and honoured."""
    kinds, count = drafter.said["layer_types"], drafter.said["num_hidden_layers"]
    where = f"{_CONFIG}: layer_types"
    if kinds is None:
        if drafter.said["use_sliding_window"]:
            why = "use_sliding_window without layer_types: which layers slide is left to a guess"
            yield Finding(REFUSE, "sliding layers", where, why, "write one entry per draft layer")
        return
    if count is not None and len(kinds) != count:
        why = f"{len(kinds)} entries for {count} draft layers"
        yield Finding(REFUSE, "sliding layers", where, why, "write one entry per draft layer")
    if odd := sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}):
        why = f"{odd[0]!r} is neither full_attention nor sliding_attention"
        yield Finding(REFUSE, "sliding layers", where, why, "write what it was trained with")
    if not any(drafter.sliding):
        return
    if engine == "tpu-inference":
        # 11 % instead of 48 % of the drafts accepted (tpu-inference#3526).
        why = "sliding layers: tpu-inference lets every draft layer see the whole context"
        remedy = "train with full_attention, or serve with vLLM or SGLang"
        yield Finding(REFUSE, "sliding layers", where, why, remedy)
    elif drafter.said["sliding_window"] is None:
        why = "sliding layers without a window size"
        where = f"{_CONFIG}: sliding_window"
        yield Finding(REFUSE, "sliding layers", where, why, "write the size it was trained with")


def check_causality(drafter: DrafterFacts, target: TargetFacts, engine: str) -> Iterator[Finding]:
    """Which layers see only earlier slots of their block: as trained, and as the engine runs it."""
    trained, runs = trained_causal(drafter), runs_causal(drafter, engine)
    names = {True: "causally", False: "in both directions"}
    where, sliding = f"{_CONFIG}: sliding_window_non_causal", drafter.sliding
    differ = [i for i, causal in enumerate(trained) if causal not in (None, runs[i])]
    if differ:
        kind = "sliding" if sliding[differ[0]] else "full-attention"
        run = names[runs[differ[0]]]
        why = f"{engine} runs the block {run} in {kind} layers {differ}; they were trained "
        why += names[not runs[differ[0]]]
        remedy = "train with full_attention in every layer, or as this engine runs it"
        if engine == "vllm" and not any(sliding):
            remedy = "write true: vLLM makes every layer of a dflash drafter causal by false"
        yield Finding(REFUSE, "block causality", where, why, remedy)
    unknown = [i for i, causal in enumerate(trained) if causal is None]
    if unknown:
        why = f"missing: {engine} runs the block {names[runs[unknown[0]]]} in sliding layers "
        why += f"{unknown}; right only if trained so"
        remedy = "write the flag that it was trained with (speculators: false, causal)"
        yield Finding(WARN, "block causality", where, why, remedy)


def trained_causal(drafter: DrafterFacts) -> list[bool | None]:
    """Per layer, whether its block was causal in training; None where the files do not say.

    The trainers let full-attention layers see the whole block; their flag is about sliding ones.
    """
    said = drafter.said
    for name in ("is_causal", "causal"):
        if said[name] is not None:
            return [said[name]] * len(drafter.sliding)
    flag = said["sliding_window_non_causal"]
    causal = None if flag is None else not flag
    return [causal if slides else False for slides in drafter.sliding]


def runs_causal(drafter: DrafterFacts, engine: str) -> list[bool]:
    """Per layer, whether the engine lets a slot see only the earlier ones of its block."""
    said, sliding = drafter.said, drafter.sliding
    if engine == "tpu-inference":  # models/jax/dflash.py: causal=False
        return [False] * len(sliding)
    if engine == "sglang":  # models/dflash.py: sliding layers are decoders, full ones encoders
        return sliding
    # vLLM, qwen3_dflash.py: is_causal, then dflash_config.causal, then sliding layers alone. Its
    # algos.py writes that second one for every dflash drafter of the speculators layout, as
    # `not sliding_window_non_causal`, so there the flag reaches full-attention layers too
    # (vllm#56692); dspark drafters do not get it.
    everywhere = said["is_causal"]
    if everywhere is None and drafter.layout == "speculators" and drafter.kind == "dflash":
        everywhere = said["sliding_window_non_causal"] is False
    elif everywhere is None:
        everywhere = said["causal"]
    return sliding if everywhere is None else [everywhere] * len(sliding)


def check_vocabulary(drafter: DrafterFacts, target: TargetFacts, engine: str) -> Iterator[Finding]:
    """A pruned vocabulary, and an embedding or LM head of the drafter's own."""
    vocab, size = drafter.said["vocab_size"], drafter.drafted
    where = f"{_CONFIG}: draft_vocab_size"
    if vocab and size and size < vocab and engine != "vllm":
        # SGLang builds W2 and the LM head over vocab_size (models/dspark.py; sglang#34734 would
        # change that); tpu-inference maps draft ids only for EAGLE-3.
        why = f"{size} of {vocab}: {engine} has no map from draft ids for such drafters"
        remedy = "train with drafter.vocab_size=0, or serve with vLLM"
        yield Finding(REFUSE, "draft vocabulary", where, why, remedy)
    yield from check_own_tables(drafter, target, engine)
    if engine == "sglang" and any(-1 in taps for taps in drafter.taps.values()):
        why = "-1, the embedding's output: SGLang takes layers from 0 on"  # dflash_utils.py
        where = f"{_CONFIG}: target_layer_ids"
        yield Finding(REFUSE, "layer ids", where, why, "train with decoder layers only")


def check_own_tables(drafter: DrafterFacts, target: TargetFacts, engine: str) -> Iterator[Finding]:
    """An embedding or LM head in the drafter's files that is not the target's."""
    for name in BORROWED:
        trained = False
        if drafter.kind == "eagle3" and name == "lm_head.weight":
            # Most trainers of EAGLE-3 train a head of its own; ours uses the target's.
            trained = drafter.record is None
        elif drafter.kind == "eagle3":
            trained = drafter.said["embed_requires_grad"]
        if name not in drafter.tensors or trained:
            continue
        if borrowed_rows_agree(drafter, target, name) is False:
            where, why = f"weights: {name}", "not the target's rows"
            remedy = "leave it out, so that the target's is used, or use its own target"
            if engine == "sglang":  # models/dspark.py skips both; vLLM keeps a drafter's own
                why += ", which are what SGLang uses all the same"
                yield Finding(REFUSE, "shared tensor", where, why, remedy)
            else:
                why += ": right only if it was trained with an embedding and head of its own"
                yield Finding(WARN, "shared tensor", where, why, remedy)


def check_positions(drafter: DrafterFacts, target: TargetFacts, engine: str) -> Iterator[Finding]:
    """RoPE where the engine reads it, and as far as the target's context goes."""
    sections = drafter.file.sections
    places = [*sections.values(), *(values.get("rope_parameters") for values in sections.values())]
    partial = {
        place["partial_rotary_factor"]
        for place in places
        if isinstance(place, dict) and place.get("partial_rotary_factor") not in (None, 1, 1.0)
    }
    where = f"{_CONFIG}: rope_parameters"
    if partial and engine != "vllm":
        # SGLang's models/dflash.py: rotary_dim=head_dim; tpu-inference passes theta and scaling.
        why = f"partial_rotary_factor={sorted(partial)[0]}: {engine} turns every dimension"
        remedy = "serve with vLLM, or train without the factor"
        yield Finding(REFUSE, "RoPE", where, why, remedy)
    if engine == "tpu-inference" and "rope_theta" not in drafter.file.value:
        why = "missing at the top of config.json, where the JAX servers read it"
        where = f"{_CONFIG}: rope_theta"
        yield Finding(WARN, "RoPE", where, why, "copy it there from rope_parameters")
    ours = drafter.said["max_position_embeddings"]
    theirs = target.config.get("max_position_embeddings")
    if engine != "tpu-inference" and ours and isinstance(theirs, int) and ours < theirs:
        # Both size the table of angles by it; vLLM raises it for EAGLE drafters only.
        why = f"{ours}, the target's is {theirs}: beyond it the table of angles ends"
        where = f"{_CONFIG}: max_position_embeddings"
        remedy = f"write {theirs}, or serve with at most {ours} positions"
        yield Finding(WARN, "context length", where, why, remedy)


def check_scales(drafter: DrafterFacts, target: TargetFacts, engine: str) -> Iterator[Finding]:
    """Gemma's factor on the embedding and cap on the logits, which its drafters have as well."""
    # vLLM's qwen3_dflash.py looks embeddings up as they are and caps nothing.
    if engine != "vllm":
        return
    scale = embed_scale(target.config.get("model_type"), target.config["hidden_size"])
    if scale != 1.0 and drafter.tensors and "embed_tokens.weight" not in drafter.tensors:
        why = f"missing, and vLLM would feed the target's without its factor {scale:.4g}"
        remedy = "export again: the scaled embedding belongs into the file"
        yield Finding(REFUSE, "embedding scale", "weights: embed_tokens.weight", why, remedy)
    if cap := target.config.get("final_logit_softcapping"):
        why = f"{cap:g}: vLLM does not cap the logits of Qwen3 draft layers"
        where = "target's config.json: final_logit_softcapping"
        yield Finding(WARN, "logit soft-cap", where, why, "measure the accepted length there")


CHECKS: tuple[Callable[[DrafterFacts, TargetFacts, str], Iterator[Finding]], ...] = (
    check_layout,
    check_kind,
    check_layer_types,
    check_causality,
    check_vocabulary,
    check_positions,
    check_scales,
)
