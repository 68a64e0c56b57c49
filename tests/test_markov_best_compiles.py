"""The kernels of the likeliest token through the compilers of TPU and GPU, without either.

pytest tests/test_markov_best_compiles.py
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.kernels.markov_best import markov_best

F32, BF16 = jnp.float32, jnp.bfloat16


@pytest.mark.parametrize(
    "platform, name, marker",
    [("tpu", "mosaic_tpu", "tpu_custom_call"), ("cuda", "triton", "triton")],
)
@pytest.mark.parametrize("v", [151936, 49152])
@pytest.mark.parametrize("n, r", [(1, 64), (130, 256)])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_lowers_for_accelerators(platform, name, marker, v, n, r, dtype):
    shapes = ((16, n, v), F32), ((), jnp.int32), ((n, r), F32), ((v, r), dtype)
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    best = jax.jit(lambda *args: markov_best(*args, implementation=name))
    text = best.trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert sum("custom_call" in x and marker in x for x in text.splitlines()) == 1


_COMPILE_FOR_TPU = """
import re
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
from dspark_jax.kernels.markov_best import markov_best

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices


def chain(logits, anchor, w1, w2):
    def slot(prev, index):
        latent = w1.at[prev].get(out_sharding=P("fsdp", None))
        token = markov_best(logits, index, latent, w2, implementation="mosaic_tpu")
        return token, token

    return jax.lax.scan(slot, anchor, jnp.arange(len(logits)))[1]


def compile(shape, n, v, r, dtype):
    mesh = jax.make_mesh(shape, ("fsdp", "tp"), devices=devices[: shape[0] * shape[1]],
                         axis_types=(AxisType.Explicit,) * 2)

    def arg(shape, spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    with jax.set_mesh(mesh):
        args = (arg((16, n, v), (None, "fsdp", "tp")), arg((n,), ("fsdp",), jnp.int32),
                arg((v, r), (None, None)), arg((v, r), ("tp", None), dtype))
        text = jax.jit(chain).trace(*args).lower().compile().as_text()
    kernels = text.count('custom_call_target="tpu_custom_call"')
    # Nothing as large as a slot's logits is made, from one slot to the next or in a slot.
    rows, part = n // shape[0], v // shape[1]
    made = re.findall(rf"= f32\\[(?:1,)?{rows},{part}\\]", text)
    print(v, n, r, jnp.dtype(dtype), kernels, len(made), text.count("all-reduce("))


compile((1, 1), 128, 151936, 256, jnp.float32)
compile((1, 1), 1, 49152, 64, jnp.float32)
compile((2, 2), 64, 151936, 256, jnp.bfloat16)
compile((1, 1), 530, 300, 64, jnp.float32)
"""


def test_compiles_for_a_real_tpu():
    """The compiler of the chip (v5e) takes the kernel, and makes no logits of a slot around it.

    DSPARK_LIBTPU_PATH names a folder that holds libtpu, where it is not installed.
    """
    path = [str(Path(__file__).parents[1]), os.environ.get("DSPARK_LIBTPU_PATH", "")]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(x for x in [*path, os.environ.get("PYTHONPATH", "")] if x),
    }
    result = subprocess.run(
        [sys.executable, "-c", _COMPILE_FOR_TPU], env=env, capture_output=True, text=True
    )
    if result.returncode == 77:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines() == [  # kernels, logits made, exchanges of the best
        "151936 128 256 float32 1 0 0",
        "49152 1 64 float32 1 0 0",
        "151936 64 256 bfloat16 1 0 2",
        "300 530 64 float32 1 0 0",
    ]
