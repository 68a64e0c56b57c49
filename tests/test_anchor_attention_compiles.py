"""The attention kernels of blocks through the compilers of TPU and GPU, on a machine without one.

pytest tests/test_anchor_attention_compiles.py
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.kernels import anchor_attention as op

F32, BF16 = jnp.float32, jnp.bfloat16


@pytest.mark.parametrize(
    "platform, name, marker",
    [("tpu", "mosaic_tpu", "tpu_custom_call"), ("cuda", "triton", "triton")],
)
@pytest.mark.parametrize(
    "heads, queries, anchors, block, size, dim",
    [(2, 4, 512, 7, 2048, 128), (3, 3, 96, 7, 1000, 64), (1, 8, 5, 16, 77, 128)],
    ids=["qwen3", "smollm2", "ragged"],
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_lowers_for_accelerators(
    platform, name, marker, heads, queries, anchors, block, size, dim, dtype
):
    def loss(*x):
        return op.anchor_attention(*x, implementation=name).astype(F32).sum()

    slots = anchors * block
    shapes = [
        (2, heads, queries, slots, dim), (2, heads, dim, size), (2, heads, size, dim),
        (2, heads, dim, slots), (2, heads, slots, dim),
    ]  # fmt: skip
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    args += [jax.ShapeDtypeStruct((2, anchors), jnp.int32)] * 2
    step = jax.jit(jax.value_and_grad(loss, range(5)))
    text = step.trace(*args).lower(lowering_platforms=(platform,)).as_text()
    calls = [x for x in text.splitlines() if "custom_call" in x and marker in x]
    assert len(calls) == 3  # forward; queries and own blocks; context


_COMPILE_FOR_TPU = """
import sys
try:
    import libtpu
except ImportError as error:
    print(f"libtpu cannot be imported: {error}")
    sys.exit(77)
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from dspark_jax.kernels.anchor_attention import anchor_attention

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices


def compile(shape, batch, heads, queries, anchors, block, size, dim, dtype):
    mesh = jax.make_mesh(shape, ("fsdp", "tp"), devices=devices[: shape[0] * shape[1]],
                         axis_types=(AxisType.Explicit,) * 2)

    def arg(shape, *spec, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def loss(*x):
        return anchor_attention(*x).astype(jnp.float32).sum()

    slots = anchors * block
    with jax.set_mesh(mesh):
        args = [arg((batch, heads, *rest), "fsdp", "tp") for rest in (
            (queries, slots, dim), (dim, size), (size, dim), (dim, slots), (slots, dim))]
        args += [arg((batch, anchors), "fsdp", dtype=jnp.int32)] * 2
        compiled = jax.jit(jax.value_and_grad(loss, range(5))).trace(*args).lower().compile()
    kernels = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    used = compiled.memory_analysis().temp_size_in_bytes
    scores = 4 * (batch // shape[0]) * (heads // shape[1]) * queries * slots * size
    print(size, jnp.dtype(dtype), kernels, used < scores / 4)


CASES
"""
# With the line that each prints: three kernels in the program, little memory.
SMALL = {"compile((1, 1), 1, 1, 3, 96, 7, 1024, 64, jnp.float32)": "1024 float32 3 True"}
LARGE = {
    "compile((2, 2), 4, 8, 4, 512, 7, 2048, 128, jnp.bfloat16)": "2048 bfloat16 3 True",
    "compile((1, 1), 2, 1, 8, 64, 16, 777, 128, jnp.bfloat16)": "777 bfloat16 3 True",
}


@pytest.mark.parametrize("cases", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)])
def test_compiles_for_a_real_tpu(cases):
    """The compiler of the chip (v5e) takes the kernels, which are what is chosen there: tiles,
    transposed products, memory. No room for scores is set aside.

    DSPARK_LIBTPU_PATH names a folder that holds libtpu, where it is not installed.
    """
    path = [str(Path(__file__).parents[1]), os.environ.get("DSPARK_LIBTPU_PATH", "")]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(x for x in [*path, os.environ.get("PYTHONPATH", "")] if x),
    }
    program = _COMPILE_FOR_TPU.replace("CASES", "\n".join(cases))
    result = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True
    )
    if result.returncode == 77:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines() == list(cases.values())
