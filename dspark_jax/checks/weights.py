"""Do the tensors fit the config, and are those that belong to the target the target's?

Headers, the tables of a pruned vocabulary and a few rows are all that is looked at.
"""

from collections.abc import Iterator

import numpy as np

from dspark_jax.checks.facts import (
    REFUSE,
    SIZES,
    WARN,
    DrafterFacts,
    Finding,
    TargetFacts,
    sample_rows,
)
from dspark_jax.core.config import MARKOV_HEADS
from dspark_jax.core.errors import UserError
from dspark_jax.models.target_config import embed_scale
from dspark_jax.weights.importing import equal_scaled
from dspark_jax.weights.vocab_tables import TABLES, ids_of

_CONFIG = "config.json"
_FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_HEADS = ("markov_head.", "confidence_head.")
# The target's own, which some writers put into the drafter's file as well.
BORROWED = ("embed_tokens.weight", "lm_head.weight")


def check_heads(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """The heads that the config names and those whose tensors are there."""
    head, where = drafter.head, f"{_CONFIG}: markov_head_type"
    if head is None and drafter.said["markov_rank"]:
        yield Finding(REFUSE, "Markov head", where, "missing", f"one of {MARKOV_HEADS[1:]}")
    elif head not in (None, *MARKOV_HEADS):
        why = f"{head!r} is none of {', '.join(MARKOV_HEADS[1:])}"
        yield Finding(REFUSE, "Markov head", where, why, "write the one it was trained with")
    elif head is not None and drafter.tensors:
        stored = stored_head(drafter)
        if stored != head:
            why = f"{head!r}, but the tensors are those of {stored!r}"
            remedy = "write the type and markov_rank it was trained with, or export again"
            yield Finding(REFUSE, "Markov head", where, why, remedy)
    confident, where = drafter.said["enable_confidence_head"], f"{_CONFIG}: enable_confidence_head"
    if confident is None and drafter.kind == "dflash":
        confident = False
    proj = drafter.tensors.get("confidence_head.proj.weight")
    if drafter.tensors and confident is not None and confident != (proj is not None):
        why = f"{confident}, but the files have {'one, dropped silently' if proj else 'none'}"
        yield Finding(REFUSE, "confidence head", where, why, "write what the files have")
    if not (confident and drafter.said["markov_rank"]):
        return
    where = f"{_CONFIG}: confidence_head_with_markov"
    if drafter.said["confidence_head_with_markov"] is None:
        why = "missing; vLLM takes that for false, SGLang for true"
        yield Finding(REFUSE, "confidence head", where, why, "write what it was trained with")


def stored_head(drafter: DrafterFacts) -> str:
    """The Markov head whose tensors are there."""
    marks = {"rnn": "joint_proj", "gated": "gate_proj", "vanilla": "markov_w2"}
    for kind, mark in marks.items():
        if f"markov_head.{mark}.weight" in drafter.tensors:
            return kind
    return "none"


def expected_tensors(drafter: DrafterFacts) -> dict[str, tuple[int, ...]]:
    """Shapes by name of a drafter such as config.json describes; fc is left to the layer ids."""
    said, eagle3 = drafter.said, drafter.kind == "eagle3"
    d, v, rank = said["hidden_size"], said["vocab_size"], said["markov_rank"] or 0
    seen = 2 * d if eagle3 else d  # embedding beside hidden state
    q = said["num_attention_heads"] * said["head_dim"]
    kv = said["num_key_value_heads"] * said["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (d,)}
    for layer in range(said["num_hidden_layers"]):
        inside = {
            "input_layernorm": (d,),
            "self_attn.q_proj": (q, seen),
            "self_attn.k_proj": (kv, seen),
            "self_attn.v_proj": (kv, seen),
            "self_attn.o_proj": (d, q),
            "post_attention_layernorm": (d,),
            "mlp.gate_proj": (said["intermediate_size"], d),
            "mlp.up_proj": (said["intermediate_size"], d),
            "mlp.down_proj": (d, said["intermediate_size"]),
        }
        if drafter.family != "llama":
            inside |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (said["head_dim"],))
        if eagle3:
            inside["hidden_norm"] = (d,)
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in inside.items()}
    if eagle3:
        return shapes | _eagle3_tensors(drafter, d)
    shapes["hidden_norm.weight"] = (d,)
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (v, rank)}
        shapes |= {"markov_head.markov_w2.weight": (drafter.drafted, rank)}
    if rank and drafter.head == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, d + rank)}
        shapes |= {"markov_head.gate_proj.bias": (rank,)}
    if rank and drafter.head == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + d)}
        shapes |= {"markov_head.joint_proj.bias": (3 * rank,)}
    if said["enable_confidence_head"]:
        width = d + rank * bool(said["confidence_head_with_markov"])
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def _eagle3_tensors(drafter: DrafterFacts, d: int) -> dict[str, tuple[int, ...]]:
    """Norms of the taps, which are options, and the LM head, which it may share."""
    said, taps = drafter.said, len(next(iter(drafter.taps.values()), []))
    shapes: dict[str, tuple[int, ...]] = {}
    if said["norm_before_fc"]:
        shapes["input_norm.weight"] = (taps * d,)
    if said["fc_norm"]:
        shapes |= {f"fc_norm.{tap}.weight": (d,) for tap in range(taps)}
    if "lm_head.weight" in drafter.tensors:
        shapes["lm_head.weight"] = (drafter.drafted, d)
    return shapes


def check_tensors(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """Tensors missing, unknown or of another shape than config.json implies."""
    if not drafter.tensors or any(drafter.said[name] is None for name in SIZES):
        return
    if "quantization_config" in drafter.file.value:
        return  # packed tensors have other shapes and companions; check_dtypes says so
    wanted, stored = expected_tensors(drafter), drafter.tensors
    known = {"fc.weight", *TABLES, *BORROWED, *wanted}
    skipped = _HEADS[1:] if stored_head(drafter) == drafter.head else _HEADS  # see check_heads
    skipped = () if drafter.kind == "eagle3" else skipped
    missing = [n for n in ("fc.weight", *wanted) if n not in stored and not n.startswith(skipped)]
    unknown = [n for n in stored if n not in known and not n.startswith(skipped)]
    for names, what in ((missing, "missing tensor"), (unknown, "unknown tensor")):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            why = f"{', '.join(names[:4])}{more}"
            remedy = "the files are not those of this config.json: export again"
            yield Finding(REFUSE, what, "weights", why, remedy)
    for name, shape in wanted.items():
        if name in stored and stored[name].shape != shape:
            why = f"{list(stored[name].shape)}, {_CONFIG} implies {list(shape)}"
            remedy = "correct the size or flag that it follows from; never cut a tensor"
            yield Finding(REFUSE, "tensor shape", f"weights: {name}", why, remedy)


def check_dtypes(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """Quantised tensors, a dtype that the config denies, and the narrow range of float16."""
    stored = {name: tensor for name, tensor in drafter.tensors.items() if name not in TABLES}
    odd = [name for name, tensor in stored.items() if tensor.dtype not in _FLOATS.values()]
    if odd and "quantization_config" not in drafter.file.value:
        why = f"{stored[odd[0]].dtype} without quantization_config ({len(odd)} such tensors)"
        yield Finding(REFUSE, "dtype", f"weights: {odd[0]}", why, "export in bfloat16 or float32")
    elif odd:
        why = f"{stored[odd[0]].dtype}: quantised; its tensors were not checked"
        remedy = "measure its accepted length against the unquantised one"
        yield Finding(WARN, "dtype", f"weights: {odd[0]}", why, remedy)
    value, fc = drafter.file.value, drafter.tensors.get("fc.weight")
    said = value.get("dtype") or value.get("torch_dtype")
    if fc and fc.dtype in _FLOATS.values() and said in _FLOATS and _FLOATS[said] != fc.dtype:
        why = f"{said}, but the tensors are {fc.dtype}: engines would cast them"
        yield Finding(WARN, "dtype", f"{_CONFIG}: dtype", why, "write what the files hold")
    dtypes = {"drafter": fc.dtype if fc else "", "target": target.embed_dtype}
    half = [who for who, dtype in dtypes.items() if dtype == "F16"]
    if half:
        why = f"{' and '.join(half)} in float16: hidden states above 65504 overflow"
        yield Finding(WARN, "dtype", "weights", why, "use bfloat16 or float32 for both")


def check_draft_vocabulary(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """The table from draft ids to target ids: offsets, complete, and of this vocabulary."""
    vocab, size = drafter.said["vocab_size"], drafter.drafted
    d2t, t2d, where = drafter.tables.get("d2t"), drafter.tables.get("t2d"), "weights: d2t"
    if not vocab or not size or not drafter.tensors:
        return
    if size > vocab:
        why = f"{size} of a vocabulary of {vocab}"
        where = f"{_CONFIG}: draft_vocab_size"
        rows = "lm_head" if drafter.kind == "eagle3" else "markov_w2"
        yield Finding(REFUSE, "draft vocabulary", where, why, f"write the rows of {rows}")
    elif size == vocab:
        if (d2t is not None and d2t.any()) or (t2d is not None and not t2d.all()):
            why = f"it maps a part of the vocabulary, but draft_vocab_size is all of it ({vocab})"
            yield Finding(REFUSE, "draft vocabulary", where, why, "write its length there")
    elif d2t is None:
        why = f"missing, with draft_vocab_size={size} of {vocab}: draft ids would be target ids"
        yield Finding(REFUSE, "draft vocabulary", where, why, "add the table it was trained with")
    else:
        try:
            ids = ids_of(drafter.folder, d2t, t2d, size, vocab)
        except UserError as error:
            why = str(error).removeprefix(f"{drafter.folder}: ")
            remedy = f"store target id - draft id as int64[{size}], and t2d as bool[{vocab}]"
            yield Finding(REFUSE, "draft vocabulary", where, why, remedy)
            return
        for stop in (id_ for id_, role in target.roles.items() if role == "eos"):
            if stop not in ids:
                why = f"token {stop}, which ends an answer, can never be drafted"
                yield Finding(WARN, "draft vocabulary", where, why, "keep the stop tokens in it")
        if "lm_head.weight" not in drafter.tensors:
            why = f"missing; the target's cannot be used for {size} of {vocab} tokens"
            remedy = "add the target's rows at the ids of d2t"
            yield Finding(REFUSE, "draft vocabulary", "weights: lm_head.weight", why, remedy)


def borrowed_rows_agree(drafter: DrafterFacts, target: TargetFacts, name: str) -> bool | None:
    """Whether 64 rows of a table are the target's, in the shorter dtype; None if not to tell."""
    theirs = "model.embed_tokens.weight"
    if target.files is None or theirs not in target.files.files or drafter.files is None:
        return None
    if name == "lm_head.weight" and name in target.files.files:  # else tied to the embedding
        theirs = name
    tensor, vocab, size = drafter.tensors[name], drafter.said["vocab_size"], drafter.drafted
    if tensor.dtype not in _FLOATS.values() or not size or vocab != target.config["vocab_size"]:
        return None
    count = size if name == "lm_head.weight" else vocab
    if tensor.shape != (count, target.config["hidden_size"]):
        return False
    rows = np.linspace(0, count - 1, min(64, count)).astype(int)
    wanted = rows
    if count < vocab:
        try:
            ids = ids_of(
                drafter.folder, drafter.tables["d2t"], drafter.tables.get("t2d"), size, vocab
            )
        except (UserError, KeyError):
            return None  # named by check_draft_vocabulary
        wanted = ids[rows]
    if wanted.max() >= target.embed_rows:
        return False
    a = sample_rows(drafter.files, tensor.stored, rows)
    b = sample_rows(target.files, theirs, wanted)
    if name != "lm_head.weight":
        scale = embed_scale(target.config.get("model_type"), target.config["hidden_size"])
        return equal_scaled(a, b, scale)
    return equal_scaled(a, b, 1.0)
