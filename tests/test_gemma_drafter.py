"""Drafters whose target scales its embedding and caps its logits: both, on both sides (R018).

pytest tests/test_gemma_drafter.py
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_drafter
from flax import nnx
from reference import total_loss
from safetensors.numpy import load_file, save_file
from tiny_drafter import make_batch, make_drafter, make_shape, packed_rows, random_weights
from tiny_targets import model_config, write_model

from dspark_jax.checks.engines import check_scales
from dspark_jax.checks.facts import read_drafter
from dspark_jax.checks.target import read_target
from dspark_jax.convert import export_run, import_run
from dspark_jax.core.config import DataConfig, DrafterConfig, RunConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.loss_config import LossConfig
from dspark_jax.core.sharding import abstract, make_mesh, place
from dspark_jax.core.trees import named, trainable, with_tables
from dspark_jax.data.prompts import load_prompts
from dspark_jax.decoding.rounds import propose
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.target import Target, TargetHead, soft_cap
from dspark_jax.models.target_config import FAMILIES, TargetConfig
from dspark_jax.models.warm_start import check_warm_start
from dspark_jax.training.anchors import make_blocks, slot_weights
from dspark_jax.training.checkpoint import RunRecord, read_record, save_drafter, write_record
from dspark_jax.training.losses import dspark_loss
from dspark_jax.weights import names
from dspark_jax.weights.compare import empty_drafter
from dspark_jax.weights.fingerprint import fingerprint
from dspark_jax.weights.safetensors import target_config

SCALE, CAP = 4.0, 2.0
LOSS = LossConfig(ce=0.1, l1=0.9, kl=0.2, confidence=0.5, decay=3.0)
ANCHORS = np.array([[3, 6, 13, 0], [5, 8, 12, 18]], np.int32)
FILLED = np.array([[True, True, True, False], [True] * 4])


@pytest.fixture(autouse=True, scope="module")
def mesh():
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.set_mesh(make_mesh()):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def head_of(scale=SCALE, cap=CAP) -> TargetHead:
    embed, lm_head = tiny_drafter.head_arrays()
    return TargetHead(place(embed, "vocab", "embed"), place(lm_head, "vocab", "embed"), scale, cap)


def drafter_of(**options):
    """Shape, weights and drafter; one layer."""
    shape = make_shape(num_layers=1, **options)
    shape = dataclasses.replace(shape, embed_scale=SCALE, logit_softcap=CAP)
    weights = random_weights(shape, seed=5)
    return shape, weights, make_drafter(shape, weights)


# ---- Embedding and head ------------------------------------------------------------------------


def test_the_cap_is_applied_once():
    """Logits 40, 20 and -40 at a cap of 30: about 26.1, 17.5 and -26.1."""
    wanted = [26.1018, 17.4835, -26.1018]
    np.testing.assert_allclose(soft_cap(jnp.asarray([40.0, 20.0, -40.0]), 30.0), wanted, atol=1e-3)
    head = TargetHead(jnp.eye(3), None, softcap=30.0)
    logits = head.logits(jnp.asarray([[[40.0, 20.0, -40.0]]]))
    np.testing.assert_allclose(logits[0, 0], wanted, atol=1e-3)
    np.testing.assert_array_equal(soft_cap(jnp.asarray([7.0]), 0.0), [7.0])


def test_a_pruned_head_keeps_both():
    _, _, drafter = drafter_of(vocab_size=24)
    whole, pruned = head_of(), drafter.head(head_of())
    assert (pruned.embed_scale, pruned.softcap) == (SCALE, CAP)
    hidden = place(np.random.default_rng(0).normal(size=(1, 3, 16)).astype(np.float32), "batch")
    ids = np.asarray(drafter.draft_ids[...])
    wanted = np.asarray(whole.logits(hidden))[..., ids]
    np.testing.assert_allclose(pruned.logits(hidden), wanted, rtol=1e-6)


# ---- Training and drafting ---------------------------------------------------------------------


@jax.jit
def run(drafter, head, batch, anchors, filled):
    config, mask = drafter.config, batch.loss_mask
    blocks = make_blocks(anchors, filled, mask, batch.documents, config, LOSS)
    one = jax.tree.map(lambda x: x[None], blocks)  # one micro-batch
    weights = jax.tree.map(lambda x: x[0], slot_weights(one, mask[None], config, LOSS))

    def loss(params, head):
        whole = with_tables(params, drafter)
        value, _ = dspark_loss(whole, head, batch, blocks, weights, weights.unit, LOSS, 16)
        return value

    value, grads = jax.value_and_grad(loss)(trainable(drafter), head)
    return value, named(grads)


@pytest.mark.slow
def test_loss_and_gradients_match_the_loops():
    """Gradients by central differences of the reference in float64, along random directions."""
    shape, weights, drafter = drafter_of()
    rows = packed_rows()
    anchors = [list(row[on]) for row, on in zip(ANCHORS, FILLED)]

    def reference(weights):
        drafter = tiny_drafter.make_reference(shape, weights)
        return drafter.terms(rows, anchors, LOSS)

    batch = tiny_drafter.first_micro(make_batch(rows))
    chosen = place(ANCHORS, "batch"), place(FILLED, "batch")
    value, grads = jax.device_get(run(drafter, head_of(), batch, *chosen))
    terms = reference(weights)
    assert value == pytest.approx(total_loss(terms, LOSS), rel=1e-5)
    accepts = [term.accept for term in terms]  # labels of the confidence loss: no gradient
    rng = np.random.default_rng(1)
    for name in ("fc", "markov.w2"):
        direction = rng.standard_normal(weights[name].shape)
        ends = []
        for step in (1e-5, -1e-5):
            moved = weights | {name: weights[name].astype(np.float64) + step * direction}
            ends.append(total_loss(reference(moved), LOSS, accepts))
        slope = (ends[0] - ends[1]) / 2e-5
        assert (grads[name] * direction).sum() == pytest.approx(slope, rel=2e-3, abs=1e-5), name
    # Two-sided: without the cap and without the factor the loss is another one.
    for other in (head_of(cap=0.0), head_of(scale=1.0)):
        assert abs(float(run(drafter, other, batch, *chosen)[0]) - value) > 1e-2


def test_drafting_uses_both():
    """The proposal's distribution: the base logits capped, then the Markov bias."""
    shape, weights, drafter = drafter_of()
    reference = tiny_drafter.make_reference(shape, weights)
    row = packed_rows()[1]
    anchor = 12
    cache = drafter.empty_cache(1, 24)
    taps = place(row.taps[None, :anchor], "batch", None, None, None)
    cache = drafter.extend(cache, taps).advance(jnp.asarray([anchor]))
    params = SamplingParams.make(1, 1.0, seeds=3)
    token = place(row.tokens[None, anchor], "batch")
    draft = jax.jit(propose)(drafter, drafter.head(head_of()), token, cache, params)
    hidden = reference.block(row, anchor)
    prev = [int(row.tokens[anchor]), *map(int, np.asarray(draft.tokens)[0, :-1])]
    for slot, latent in enumerate(reference.latents(prev, hidden)):
        z = reference.draft_logits(hidden[slot], latent)
        wanted = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        np.testing.assert_allclose(np.asarray(draft.probs)[0, slot], wanted, atol=1e-5)


# ---- Files -------------------------------------------------------------------------------------

ROPE = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {**ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
GEMMA = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    "sliding_window": 4,
    "query_pre_attn_scalar": 8,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 16,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 2, "moe_intermediate_size": 8}
TARGETS = {
    "qwen3_moe": {"num_experts_per_tok": 1, "norm_topk_prob": True, "rope_parameters": ROPE}
    | EXPERTS,
    "qwen3_vl": {"rope_parameters": MROPE},
    "gemma3_text": GEMMA,
    "gemma3": GEMMA,
    "gemma4_unified": GEMMA | {"final_logit_softcapping": 30.0},
}


def write_target(folder, family):
    """A random target as its files are, written without our loader."""
    config = model_config(family, num_hidden_layers=2, rope_theta=None, **TARGETS[family])
    if family in ("qwen3_vl", "gemma3", "gemma4_unified"):
        tied = config.pop("tie_word_embeddings")
        config = {"model_type": family, "text_config": config, "tie_word_embeddings": tied}
    config["architectures"] = [FAMILIES[family]]
    shape = TargetConfig.from_hf(config, "float32")
    rng, tensors = np.random.default_rng(0), {}
    for ours, leaf in named(abstract(lambda: Target(shape, rngs=nnx.Rngs(0)))).items():
        theirs, rows = names.to_file(names.TARGET, ours)
        array = rng.standard_normal(leaf.shape, np.float32) * 0.2
        if ".experts." in ours:
            for index, one in enumerate(array):
                tensors[theirs.replace("experts.", f"experts.{index}.") + ".weight"] = one
        else:
            tensors[theirs] = array.reshape(names.file_shape(leaf.shape, rows))
    prefix = {"gemma3": "language_model.model."}.get(family, "model.language_model.")
    if "text_config" in config:
        tensors = {
            prefix + name.removeprefix("model.") if name.startswith("model.") else name: tensor
            for name, tensor in tensors.items()
        }
    return write_model(folder, config, tensors)


def make_run(workdir, target, **changes):
    """A run as train leaves it."""
    options = {"target_layer_ids": (0,), "mask_token_id": 5, "block_size": 3, "num_layers": 1}
    drafter = DrafterConfig(**options, markov_rank=4, dtype="float32", **changes)
    config = RunConfig(str(target), DataConfig("generator:8"), drafter, target_dtype="float32")
    named_classes = tuple(json.loads((target / "config.json").read_text())["architectures"])
    shape = target_config(target, "float32")
    identity = fingerprint(target, str(target))
    record = RunRecord(config, identity, str(target), shape, named_classes)
    write_record(workdir, record)
    rng = np.random.default_rng(1)
    leaves = named(empty_drafter(record.shape))
    arrays = {name: rng.standard_normal(x.shape, np.float32) for name, x in leaves.items()}
    save_drafter(workdir, arrays, 40)
    return record


SLOW = pytest.mark.slow
EXPORTED = ["qwen3_moe", "gemma3", "gemma4_unified"]


@pytest.mark.parametrize(
    "family", [*EXPORTED, *(pytest.param(x, marks=SLOW) for x in ("qwen3_vl", "gemma3_text"))]
)
def test_an_export_names_its_verifier(family, tmp_path):
    """And comes back as the run that it was."""
    target = write_target(tmp_path / "target", family)
    record = make_run(tmp_path / "run", target)
    assert read_record(tmp_path / "run") == record
    cap = record.shape.logit_softcap
    if cap:
        with pytest.raises(UserError, match="final_logit_softcapping=30.*--force"):
            export_run(tmp_path / "run", tmp_path / "out")
    exported = export_run(tmp_path / "run", tmp_path / "out", force=bool(cap))
    assert exported.difference == 0.0
    config = json.loads((exported.directory / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": [FAMILIES[family]],
    }
    assert config["transformer_layer_config"].get("final_logit_softcapping", 0.0) == cap
    back = import_run(exported.directory, tmp_path / "back")
    assert dataclasses.replace(back, imported=record.imported) == record
    facts = read_drafter(exported.directory), read_target(target, str(target))
    assert facts[1].fingerprint is not None and facts[1].rope == record.target_config.rope
    found = [finding.what for finding in check_scales(*facts, "vllm")]
    assert found == (["logit soft-cap"] if cap else [])
    assert not list(check_scales(*facts, "sglang"))


def test_the_exported_embedding_has_its_factor(tmp_path):
    target = write_target(tmp_path / "target", "gemma3")
    make_run(tmp_path / "run", target)
    folder = export_run(tmp_path / "run", tmp_path / "out").directory
    tensors = load_file(folder / "model.safetensors")
    theirs = load_file(target / "model.safetensors")["language_model.model.embed_tokens.weight"]
    np.testing.assert_array_equal(tensors["embed_tokens.weight"], theirs * np.float32(32**0.5))
    short = export_run(tmp_path / "run", tmp_path / "short", dtype="bfloat16").directory
    import_run(short, tmp_path / "from_short")  # the same in a shorter dtype
    tensors["embed_tokens.weight"] = theirs
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="'embed_tokens.weight' is not the embedding"):
        import_run(folder, tmp_path / "back")
    del tensors["embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    facts = read_drafter(folder), read_target(target, str(target))
    assert [finding.what for finding in check_scales(*facts, "vllm")] == ["embedding scale"]
    described = json.loads((short / "config.json").read_text())
    del described["embed_scale"]
    (short / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="embed_tokens|embed_scale"):
        import_run(short, tmp_path / "unscaled")
    bf16 = load_file(short / "model.safetensors")["embed_tokens.weight"]
    assert bf16.dtype == ml_dtypes.bfloat16


# ---- What is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text"])
def test_no_warm_start_from_other_layers(family):
    config = model_config(family, num_hidden_layers=2, rope_theta=None, **TARGETS[family])
    target = TargetConfig.from_hf(config, "float32")
    drafter = DrafterConfig(target_layer_ids=(0,), mask_token_id=5, num_layers=1, init="target")
    with pytest.raises(UserError, match=f"drafter.init='target'.*{family}"):
        check_warm_start(DrafterShape.of(drafter, target), target)


def test_images_in_prompts_are_named(tmp_path):
    parts = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is this?"}]
    line = {"messages": [{"role": "user", "content": parts}]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match="user message holds 'image'; the commands take text only"):
        load_prompts(str(tmp_path / "prompts.jsonl"), seed=0)
