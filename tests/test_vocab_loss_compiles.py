"""The vocabulary loss through the compilers of TPU and GPU, on a machine that has neither.

pytest tests/test_vocab_loss_compiles.py
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.kernels.vocab_loss import Teacher, vocab_loss

F32, BF16 = jnp.float32, jnp.bfloat16


def step(hidden, latent, w2, head, taught, at, labels, weights, **options):
    """Loss and gradients of rows that share positions."""

    def loss(hidden, latent, w2):
        teacher = Teacher(taught, at=at)
        return vocab_loss(
            hidden,
            latent,
            w2,
            head,
            teacher,
            labels,
            weights,
            ce_weight=0.1,
            l1_weight=0.9,
            **options,
        )

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(hidden, latent, w2)


def shapes(batch, rows, positions, vocab, dims, rank, dtype):
    """Of the operands of `step`."""
    return [
        ((batch, rows, dims), dtype),
        ((batch, positions, rank), F32),
        ((vocab, rank), F32),
        ((vocab, dims), dtype),
        ((batch, positions, dims), dtype),
        ((batch, rows), jnp.int32),
        ((batch, rows), jnp.int32),
        ((batch, rows), F32),
    ]


@pytest.mark.parametrize(
    "platform, name, marker",
    [("tpu", "mosaic_tpu", "tpu_custom_call"), ("cuda", "triton", "triton")],
)
@pytest.mark.parametrize("dtype, softcap", [(F32, 30.0), (BF16, 0.0)], ids=["f32", "bf16"])
def test_lowers_for_accelerators(platform, name, marker, dtype, softcap):
    """Kernels in the program, and no array of all rows' logits anywhere in it."""
    batch, rows, vocab = 2, 700, 151936
    args = [jax.ShapeDtypeStruct(*x) for x in shapes(batch, rows, 100, vocab, 256, 64, dtype)]
    options = {"shared_latent": True, "implementation": name, "softcap": softcap, "kl_weight": 0.1}
    traced = jax.jit(lambda *args: step(*args, **options)).trace(*args)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    calls = [x for x in text.splitlines() if "custom_call" in x and marker in x]
    assert len(calls) == (3 if platform == "tpu" else 4)  # positions have a softmax of their own
    sizes = []

    def visit(part):
        part = getattr(part, "jaxpr", part)
        for equation in getattr(part, "eqns", ()):
            sizes.extend(math.prod(v.aval.shape) for v in equation.outvars)
            for inner in equation.params.values():
                visit(inner)

    visit(traced.jaxpr)
    assert 256 * vocab <= max(sizes) < 400 * vocab  # of 1,400 rows


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
from test_vocab_loss_compiles import shapes, step

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
SPECS = [("fsdp",), ("fsdp",), ("tp", "fsdp"), ("tp", "fsdp"), *[("fsdp",)] * 4]


def compile(mesh, rows, positions, vocab, dims, rank, dtype, chunk=256, **options):
    mesh = jax.make_mesh(mesh, ("fsdp", "tp"), devices=devices[: mesh[0] * mesh[1]],
                         axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        args = [jax.ShapeDtypeStruct(*x, sharding=NamedSharding(mesh, P(*spec)))
                for x, spec in zip(shapes(2, rows, positions, vocab, dims, rank, dtype), SPECS)]
        run = jax.jit(lambda *args: step(*args, shared_latent=True, chunk=chunk, **options))
        compiled = run.trace(*args).lower().compile()
    kernels = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    rows_here, vocab_here = 2 * rows // mesh.shape["fsdp"], vocab // mesh.shape["tp"]
    share = compiled.memory_analysis().temp_size_in_bytes / (4 * rows_here * vocab_here)
    print(vocab, jnp.dtype(dtype), kernels, share < 0.5, file=sys.stdout)
    print(f"temporaries {share:.3f} of all logits", file=sys.stderr)


compile((2, 2), 3584, 512, 151936, 2560, 256, jnp.bfloat16, implementation="mosaic_tpu")
compile((1, 1), 3584, 512, 49152, 576, 64, jnp.float32, softcap=30.0, kl_weight=0.1)
compile((1, 1), 1792, 512, 8190, 576, 64, jnp.bfloat16)
"""


@pytest.mark.slow
def test_compiles_for_a_real_tpu():
    """The compiler of the chip (v5e) takes the kernels and needs far less than all logits.

    DSPARK_LIBTPU_PATH names a folder that holds libtpu, where it is not installed.
    """
    here = Path(__file__).parent
    path = [str(here), str(here.parent), os.environ.get("DSPARK_LIBTPU_PATH", "")]
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
    assert result.stdout.splitlines() == [  # all three kernels; less than half of all logits
        "151936 bfloat16 3 True",
        "49152 float32 3 True",
        "8190 bfloat16 3 True",
    ]
