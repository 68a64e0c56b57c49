"""The packed round through a TPU's compiler, on a machine without one: is less verified less work?

pytest -m slow tests/test_flat_compiles.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_COMPILE = """
import json
import sys
try:
    import libtpu
except ImportError as error:
    print(f"libtpu cannot be imported: {error}")
    sys.exit(77)
import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType

from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.sharding import abstract
from dspark_jax.decoding.flat import empty_rows, flat_round
from dspark_jax.decoding.rounds import Draft
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.models.drafter import Drafter, DrafterShape
from dspark_jax.models.layers import RopeConfig
from dspark_jax.models.target import Target, TargetConfig

ROWS, CAPACITY = 8, 512
config = TargetConfig(
    family="llama", vocab_size=8192, hidden_size=512, num_layers=3, num_heads=8, num_kv_heads=2,
    head_dim=128, intermediate_size=1536, rms_norm_eps=1e-5, rope=RopeConfig(1e4),
    tie_embeddings=False, max_positions=4096, dtype="bfloat16",
)
options = DrafterConfig((0, 1), 7, block_size=7, num_layers=1, markov_rank=32, dtype="bfloat16")
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = jax.make_mesh((1, 2), ("fsdp", "tp"), devices=devices[:2],
                     axis_types=(AxisType.Explicit,) * 2)
found = []
with jax.set_mesh(mesh):
    target = abstract(lambda: Target(config, rngs=nnx.Rngs(0)))
    shape = DrafterShape.of(options, config)
    drafter = abstract(lambda: Drafter(shape, rngs=nnx.Rngs(0)))
    rows = abstract(lambda t, d: empty_rows(t, d, rows=ROWS, capacity=CAPACITY), target, drafter)
    head = abstract(lambda t, d: d.head(t.head), target, drafter)

    def of(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    params = jax.tree.map(lambda x: of(x.shape, x.dtype), SamplingParams.make(ROWS, 0.0, seeds=0))
    draft = Draft(of((ROWS, 7)), None, of((ROWS, 7), jnp.float32))
    given = rows, draft, of((ROWS,)), of((ROWS,), jnp.bool), params, of((1,))
    for size in (8, 16, 32, 64):
        lowered = flat_round.trace(target, drafter, head, *given, size=size).lower()
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(rows.target_cache))
        found.append({
            "size": size,
            "flops": compiled.cost_analysis()["flops"],
            "kept_in_place": memory.alias_size_in_bytes,
            "cache_per_device": cache // 2,
        })
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_shorter_list_is_less_work_on_a_tpu_and_caches_stay_in_place():
    path = [str(Path(__file__).parents[1]), os.environ.get("DSPARK_LIBTPU_PATH", "")]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(x for x in [*path, os.environ.get("PYTHONPATH", "")] if x),
    }
    result = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=env, capture_output=True, text=True
    )
    if result.returncode == 77:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    print(found)
    for one in found:
        assert one["kept_in_place"] >= one["cache_per_device"]
    flops = {one["size"]: one["flops"] for one in found}
    # Attention is that of all rows and slots at every size; the rest is in proportion.
    assert flops[8] < 0.45 * flops[64] and flops[16] < 0.55 * flops[64] < flops[32] * 1.9
