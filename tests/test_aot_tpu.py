"""What aot_tpu.py counts, against numbers worked out by hand, and a config compiled end to end.

pytest tests/test_aot_tpu.py
"""

import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from dspark_jax.core.config import DataConfig, DrafterConfig, MeshConfig, RunConfig, TrainConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.kernels.markov_bias import latent_bias
from dspark_jax.models.target import check_taps
from dspark_jax.models.target_config import TargetConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

import aot_tpu
import program_costs

SCRIPT = str(ROOT / "experiments" / "aot_tpu.py")


def flops(fn, *shapes) -> int:
    return program_costs.flops(
        jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    )


def test_flops_multiply_loops_out():
    a, b = (3, 8), (8, 8)
    one = 2 * 3 * 8 * 8
    assert flops(jnp.matmul, a, b) == one
    assert flops(lambda x, w: jnp.einsum("bnd,bmd->bnm", x, w), (5, 3, 8), (5, 4, 8)) == 960

    def looped(x, w):
        return jax.lax.fori_loop(0, 7, lambda _, x: x @ w, x)

    assert flops(looped, a, b) == flops(jax.jit(looped), a, b) == 7 * one
    # Gradients in both operands: two products more. Recomputed: each of two runs twice.
    whole = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), argnums=(0, 1))
    assert flops(whole, a, b) == 3 * one
    again = jax.checkpoint(lambda x, w: jnp.sum(jnp.sin(jnp.sin(x @ w) @ w)))
    assert flops(jax.grad(again, argnums=(0, 1)), a, b) == 2 * (2 + 2) * one
    assert flops(lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x), a, b) == (
        2 * one
    )
    ragged = jax.make_jaxpr(jax.lax.ragged_dot)(
        jnp.zeros((12, 8)), jnp.zeros((4, 8, 5)), jnp.zeros(4, jnp.int32)
    )
    assert program_costs.flops(ragged) == 2 * 12 * 8 * 5


def test_flops_of_shards_and_kernels():
    with jax.set_mesh(make_mesh(4, 2)):
        whole = jax.ShapeDtypeStruct((8, 16), jnp.float32)
        spec = P("fsdp", "tp")

        def local(x):  # each of 8 devices: [2, 8] by itself
            return x @ x.T

        fn = jax.shard_map(local, in_specs=spec, out_specs=P("fsdp", "tp"))
        x = jax.device_put(jnp.zeros(whole.shape), jax.NamedSharding(jax.sharding.get_mesh(), spec))
        assert program_costs.flops(jax.make_jaxpr(fn)(x)) == 8 * 2 * 2 * 8 * 2
    # A kernel's tiles may hang over the edge: what they do there is done.
    n, v, r = 600, 300, 16
    args = jnp.zeros((n, v)), jnp.zeros((n, r)), jnp.zeros((v, r))
    found = program_costs.flops(
        jax.make_jaxpr(lambda *a: latent_bias(*a, implementation="interpret"))(*args)
    )
    assert 2 * n * v * r <= found <= 4 * n * v * r


HLO = """HloModule jit_f, is_scheduled=true

%fused_slice (param_0: f32[10,64,128], param_1: s32[]) -> f32[64,128] {
  %param_0 = f32[10,64,128]{2,1,0:T(8,128)} parameter(0)
  %param_1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %slice.1 = f32[1,64,128]{2,1,0:T(8,128)} dynamic-slice(%param_0, %param_1, %zero, %zero), dynamic_slice_sizes={1,64,128}
  ROOT %bitcast.1 = f32[64,128]{1,0:T(8,128)} bitcast(%slice.1)
}

%gathered (param_0: bf16[16,128]) -> (bf16[16,128], bf16[64,128]) {
  %param_0 = bf16[16,128]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[64,128]{1,0:T(8,128)(2,1)} all-gather(%param_0), channel_id=1, replica_groups=mesh['a'=1,'b'=4] {'b'}, dimensions={0}
  ROOT %tuple.1 = (bf16[16,128]{1,0:T(8,128)(2,1)}, bf16[64,128]{1,0:T(8,128)(2,1)}) tuple(%param_0, %all-gather.1)
}

%all-reduce-scatter.1 (param_0: f32[64,128]) -> f32[16,128] {
  %param_0 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[64,128]{1,0:T(8,128)} all-reduce(%param_0), channel_id=2, replica_groups=[1,4]<=[4], to_apply=%add
  %at = s32[]{:T(128)} constant(0)
  ROOT %slice.2 = f32[16,128]{1,0:T(8,128)} dynamic-slice(%all-reduce.1, %at, %at), dynamic_slice_sizes={16,128}
}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

%body (state: (s32[], f32[10,64,128], bf16[16,128])) -> (s32[], f32[10,64,128], bf16[16,128]) {
  %state = (s32[]{:T(128)}, f32[10,64,128]{2,1,0:T(8,128)}, bf16[16,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %one = s32[]{:T(128)} constant(1)
  %more = s32[]{:T(128)S(6)} add(%i, %one)
  %xs = f32[10,64,128]{2,1,0:T(8,128)} get-tuple-element(%state), index=1
  %w = bf16[16,128]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=2
  %row = f32[64,128]{1,0:T(8,128)} fusion(%xs, %i), kind=kLoop, calls=%fused_slice
  %first = (bf16[16,128]{1,0:T(8,128)(2,1)}, /*index=1*/bf16[64,128]{1,0:T(8,128)(2,1)}) fusion(%w), kind=kCustom, calls=%gathered
  %second = (bf16[16,128]{1,0:T(8,128)(2,1)}, /*index=1*/bf16[64,128]{1,0:T(8,128)(2,1)}) fusion(%w), kind=kCustom, calls=%gathered
  %fast = f32[64,128]{1,0:T(8,128)S(1)} copy(%row)
  %here = f32[64,128]{1,0:T(8,128)S(1)} negate(%fast)
  %part = f32[16,128]{1,0:T(8,128)} fusion(%row), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %next = (s32[]{:T(128)}, f32[10,64,128]{2,1,0:T(8,128)}, bf16[16,128]{1,0:T(8,128)(2,1)}) tuple(%more, %xs, %w)
}

%condition (state: (s32[], f32[10,64,128], bf16[16,128])) -> pred[] {
  %state = (s32[]{:T(128)}, f32[10,64,128]{2,1,0:T(8,128)}, bf16[16,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %limit = s32[]{:T(128)} constant(10)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

ENTRY %main (state: (s32[], f32[10,64,128], bf16[16,128])) -> (s32[], f32[10,64,128], bf16[16,128]) {
  %state = (s32[]{:T(128)}, f32[10,64,128]{2,1,0:T(8,128)}, bf16[16,128]{1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %loop = (s32[]{:T(128)}, f32[10,64,128]{2,1,0:T(8,128)}, bf16[16,128]{1,0:T(8,128)(2,1)}) while(%state), condition=%condition, body=%body
}
"""  # noqa: E501


def test_traffic_of_a_compiled_loop():
    """One row sliced of ten, a gather seen in two fusions, a scatter, and what lies in VMEM."""
    row, shard, gathered, part = 64 * 128 * 4, 16 * 128 * 2, 64 * 128 * 2, 16 * 128 * 4
    once = (
        2 * row
        + 4  # slice: read and written, and where
        + 2 * 4  # the counter and its step
        + (shard + gathered)  # both fusions are stages of one gather
        + row  # the copy into VMEM reads; negate there moves nothing
        + (row + part)  # scatter
        + part  # and its slice
    )
    for loops, times in ((True, 10), (False, 1)):
        found = program_costs.traffic(HLO, loops)
        assert found.collectives["all-gather"] == times * gathered
        assert found.collectives["reduce-scatter"] == times * part
        assert sum(found.collectives.values()) == times * (gathered + part)
        assert found.link_bytes == times * (gathered + row)
        assert found.hbm_bytes == times * once
        assert found.uncounted_loops == 0
    # By twos; from 4 onward; and with a limit that nobody sees, which is said.
    by_two = HLO.replace("%one = s32[]{:T(128)} constant(1)", "%one = s32[]{:T(128)} constant(2)")
    assert program_costs.traffic(by_two).link_bytes == 5 * (gathered + row)
    from_four = HLO.replace("while(%state)", "while(%init)").replace(
        "  ROOT %loop",
        """\
  %four = s32[]{:T(128)} constant(4)
  %init = (s32[]{:T(128)}, f32[10,64,128]{2,1,0}, bf16[16,128]{1,0}) tuple(%four, %xs, %w)
  ROOT %loop""",
    )
    assert program_costs.traffic(from_four).link_bytes == 6 * (gathered + row)
    unknown = program_costs.traffic(HLO.replace("constant(10)", "parameter(1)"))
    assert unknown.uncounted_loops == 1 and unknown.hbm_bytes == once


TARGET = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
SMALL = {
    "drafter.target_layer_ids": "(0,)",
    "drafter.mask_token_id": "7",
    "drafter.num_layers": "1",
    "train.global_batch_size": "16",
    "train.accumulation": "4",
    "train.num_anchors": "16",
    "train.loss_chunk": "64",
    "data.sequence_length": "256",
}


def aot(folder: pathlib.Path, *args: str, config: str = "qwen3_4b") -> subprocess.CompletedProcess:
    """Runs the script; DSPARK_LIBTPU_PATH names a folder that holds libtpu, if not installed."""
    path = [str(ROOT), os.environ.get("DSPARK_LIBTPU_PATH", ""), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, SCRIPT, f"--config={ROOT}/configs/{config}.py"]
    command += [f"--out={folder / 'report.json'}", *args]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def small(folder: pathlib.Path, *args: str) -> subprocess.CompletedProcess:
    (folder / "config.json").write_text(json.dumps(TARGET))
    fields = [f"--config.{name}={value}" for name, value in SMALL.items()]
    sizes = ["--requests=8", "--context=128", f"--target_config={folder}"]
    return aot(folder, *fields, *sizes, *args)


def without_libtpu(result: subprocess.CompletedProcess) -> bool:
    return result.returncode == 2 and "needs libtpu" in result.stderr and "v5e:2x2" in result.stderr


def test_a_config_end_to_end(tmp_path):
    """Features, train step and round of a real config with small sizes, for four real chips."""
    result = small(tmp_path, "--topology=v5e:2x2")
    if without_libtpu(result):
        pytest.skip("libtpu cannot be imported")
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report) == 1
    rows = next(iter(report.values()))
    assert list(rows) == ["features", "train step", "round"]
    for name, row in rows.items():
        assert row["fits"] and row["mesh"] == {"fsdp": 4, "tp": 1} and not row["uncounted_loops"]
        assert row["floor_seconds"] == max(row["seconds"].values()) > 0
        assert row["seconds"]["arithmetic"] == pytest.approx(row["flops"] / 197e12)
        assert row["total_bytes"] == row["program_bytes"] + row["beside_bytes"]
        assert row["usable_hbm_bytes"] == 15.75 * 2**30
        # The weights lie sharded: every program gathers them, in every micro-batch.
        assert row["collective_bytes"]["all-gather"] > 0, name
    # The target on 16 rows: products with every weight but the embedding, and two with keys.
    layer = 256 * 128 * (4 + 2 + 2 + 4) + 3 * 256 * 256
    products, squares = 2 * 2 * 256 * layer, 2 * 2 * 2 * 256 * 256 * 4 * 128
    assert rows["features"]["flops"] == 16 * (products + squares) / 4
    assert rows["train step"]["flops"] > rows["round"]["flops"] > 0
    assert "| features | yes |" in result.stdout and "floor ms" in result.stdout


@pytest.mark.slow
def test_what_is_there_is_not_compiled_again(tmp_path):
    """The second run keeps every row; another program is compiled anew."""
    result = small(tmp_path, "--topology=v5e:2x2")
    if without_libtpu(result):
        pytest.skip("libtpu cannot be imported")
    before = json.loads((tmp_path / "report.json").read_text())
    assert small(tmp_path, "--topology=v5e:2x2").returncode == 0
    assert json.loads((tmp_path / "report.json").read_text()) == before
    assert small(tmp_path, "--topology=v5e:2x2", "--requests=12").returncode == 0
    ((key, after),) = json.loads((tmp_path / "report.json").read_text()).items()
    assert after["round"]["program"] != before[key]["round"]["program"]
    assert after["features"] == before[key]["features"]


def run_config(**changes: object) -> RunConfig:
    """The small config in this process."""
    fields = {"global_batch_size": 16, "accumulation": 4, "num_anchors": 16, "loss_chunk": 64}
    return RunConfig(
        "some/target",
        DataConfig("generator:1", sequence_length=256),
        DrafterConfig((0,), 7, num_layers=1),
        train=TrainConfig(**fields),
        **changes,
    )


def test_lowers_for_gpus_with_the_kernel():
    target = TargetConfig.from_hf(TARGET, "bfloat16")
    seen = []
    rows = aot_tpu.run(run_config(), target, "cuda", 8, 128, on_row=lambda *x: seen.append(x))
    assert seen == list(rows.items()) and list(rows) == ["features", "train step", "round"]
    assert rows["round"]["kernels"]["__gpu$xla.gpu.triton"] >= 1  # the Markov bias
    for name, row in rows.items():
        assert row["lowered_bytes"] > 1e4 and "fits" not in row
        assert "lowered, not compiled" in " ".join(aot_tpu.line("x", name, row))


def test_a_program_that_does_not_fit_is_a_row():
    """What was refused says by how much; figures that nobody has are not made up."""
    row = {"topology": "v5e:4x4", "mesh": {"fsdp": 16, "tp": 1}, "fits": False, "refused": True}
    row |= {"total_bytes": 2**34, "beside_bytes": 2**30, "usable_hbm_bytes": 2**33, "flops": 1e12}
    cells = aot_tpu.line("qwen3_4b v5e:4x4", "train step", row)
    assert cells[4:8] == ("no", "15.00", "1.00", "200%")
    assert set(cells[9:15]) == {"-"} and cells[-1] == "refused by the compiler"
    assert aot_tpu.line("x", "y", row | {"total_bytes": None})[5:8] == ("?", "1.00", "?")
    report = {"qwen3_4b v5e:4x4": {"train step": row}, "other v5e:4x4": {"train step": row}}
    assert "qwen3_4b" in aot_tpu.summary(report) and "other" in aot_tpu.summary(report)


def test_mistakes_are_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for call, message in (
        (lambda: aot_tpu.mesh_of(MeshConfig(), "v9:2x2"), "v5e, v5p, v6e as in v5e:4x4, or cuda"),
        (lambda: aot_tpu.target_fields("no/such", None), "no/such: not on the hub now"),
        (lambda: aot_tpu.target_fields("x", "/nowhere"), "/nowhere/config.json"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_qwen3_4b_compiles_for_sixteen_chips(tmp_path):
    """The shipped config as it is; docs/tpu.md has its row."""
    result = aot(tmp_path, "--topology=v6e:4x4")
    if result.returncode == 2 and "needs libtpu" in result.stderr:
        pytest.skip("libtpu cannot be imported")
    assert result.returncode == 0, result.stderr[-2000:]
    ((_, rows),) = json.loads((tmp_path / "report.json").read_text()).items()
    assert list(rows) == ["features", "train step", "round"]
    assert all(row["fits"] for row in rows.values())
    tokens, each = 512 * 3072, 2 * 36 * (2560 * 128 * (32 + 8 + 8 + 32) + 3 * 2560 * 9728)
    assert rows["features"]["flops"] * 16 > tokens * each  # and attention


def test_shapes_are_those_of_the_config_files():
    """Each is read without complaint, and the taps of its config fit."""
    shapes = json.loads((ROOT / "experiments" / "target_shapes.json").read_text())
    texts = {path.stem: path.read_text() for path in (ROOT / "configs").glob("*.py")}
    for name, fields in shapes.items():
        config = TargetConfig.from_hf(fields, "bfloat16", name)
        text = next(text for text in texts.values() if f'"{name}"' in text)
        taps = tuple(json.loads(f"[{text.split('taps=(')[1].split(')')[0]}]"))
        check_taps(taps, config.num_layers)
        if config.experts is None:  # its name says its size
            layer = (
                config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
                + 3 * config.hidden_size * config.intermediate_size
            )
            tables = (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size
            size = config.num_layers * layer + tables
            billions = float(name.lower().split("-")[-1 if "Qwen" in name else -2].strip("b"))
            assert math.isclose(size / 1e9, billions, rel_tol=0.06), (name, size)
