"""One of several processes that make the first step of tests/test_step.py together.

Flags: --coordinator, --num_processes, --process_id. Process 0 writes what came out as JSON to the
file that the last argument names.
"""

import json
import sys

import jax
import numpy as np
from test_step import RECIPE, RECORD, eight_rows, new_state
from tiny_drafter import make_batch, make_head

from dspark_jax.core import processes
from dspark_jax.core.command import run_main
from dspark_jax.core.sharding import make_mesh, to_host
from dspark_jax.core.trees import to_plain
from dspark_jax.training.step import train_step

# Those of the second process have no supervised slot at all.
ORDER = [0, 1, 4, 7, 2, 3, 5, 6]


def main() -> None:
    join()
    rows = eight_rows()
    with jax.set_mesh(make_mesh(4, 2)):
        batch = make_batch([rows[i] for i in ORDER], 1, ORDER)
        state, metrics = train_step(new_state(RECORD), make_head(), batch, tx=RECORD, recipe=RECIPE)
        grads, metrics = to_host((to_plain(state).opt_state[0], metrics))
    seen = sum(np.prod(shard.data.shape) for shard in batch.tokens.addressable_shards)
    if processes.is_first():
        found = {
            "loss": float(metrics["loss"]),
            "grads": {name: grad.tolist() for name, grad in grads.items()},
            "weight": float(metrics["sums"].weight),
            "tokens_here": int(seen),
        }
        with open(OUT, "w") as file:
            json.dump(found, file)


OUT = sys.argv.pop()
join = processes.define_flags()
if __name__ == "__main__":
    run_main(main)
