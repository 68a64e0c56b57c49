"""The Markov bias kernels through the compilers of TPU and GPU, on a machine that has neither.

pytest tests/test_markov_bias_compiles.py
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.kernels import markov_bias as op

F32, BF16 = jnp.float32, jnp.bfloat16


@pytest.mark.parametrize(
    "platform, name, marker",
    [("tpu", "mosaic_tpu", "tpu_custom_call"), ("cuda", "triton", "triton")],
)
@pytest.mark.parametrize("v", [151936, 49152])
@pytest.mark.parametrize("r", [64, 256])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_lowers_for_accelerators(platform, name, marker, v, r, dtype):
    def loss(logits, prev, w1, w2, latent):
        biased = op.markov_bias(logits, prev, w1, w2, implementation=name)
        biased = op.latent_bias(biased, latent, w2, implementation=name)
        return jax.nn.logsumexp(biased.astype(F32), -1).mean()

    shapes = ((511, v), (511,), (v, r), (v, r), (511, r))
    args = [jax.ShapeDtypeStruct(s, dtype if len(s) > 1 else jnp.int32) for s in shapes]
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3, 4)))
    text = step.trace(*args).lower(lowering_platforms=(platform,)).as_text()
    calls = [x for x in text.splitlines() if "custom_call" in x and marker in x]
    assert len(calls) == 2


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
from dspark_jax.kernels.markov_bias import latent_bias, markov_bias

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices


def forward(logits, prev, w1, w2, latent):
    biased = markov_bias(logits * 2, prev, w1, w2, implementation="mosaic_tpu")
    biased = latent_bias(biased, latent, w2, implementation="mosaic_tpu")
    return (biased.astype(jnp.float32) ** 2).mean(), biased


gradient = jax.grad(forward, argnums=(0, 2, 3, 4), has_aux=True)  # and the value beside it


def compile(shape, n, v, r, dtype, fn, w1_spec=(None, None)):
    mesh = jax.make_mesh(shape, ("fsdp", "tp"), devices=devices[: shape[0] * shape[1]],
                         axis_types=(AxisType.Explicit,) * 2)

    def arg(shape, spec, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    with jax.set_mesh(mesh):
        args = (arg((n, v), ("fsdp", "tp")), arg((n,), ("fsdp",), jnp.int32), arg((v, r), w1_spec),
                arg((v, r), ("tp", None)), arg((n, r), ("fsdp", None)))
        compiled = jax.jit(fn).trace(*args).lower().compile()
    kernels = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    print(v, jnp.dtype(dtype), kernels)


compile((2, 2), 1022, 151936, 256, jnp.bfloat16, forward)
compile((2, 2), 64, 151936, 256, jnp.float32, forward, (None, "fsdp"))
compile((2, 2), 510, 49152, 256, jnp.bfloat16, gradient)
compile((1, 1), 3, 49152, 64, jnp.float32, forward)
compile((1, 1), 530, 300, 64, jnp.float32, gradient)
"""


def test_compiles_for_a_real_tpu():
    """The compiler of the chip (v5e) takes the kernels: tiles, copies, memory; forward and back.

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
    assert result.stdout.splitlines() == [  # both kernels in every program
        "151936 bfloat16 2",
        "151936 float32 2",
        "49152 bfloat16 2",
        "49152 float32 2",
        "300 float32 2",
    ]
