"""Times the steps of serving on this machine, for scheduling/step_costs.py.

A step is `flat.flat_round`, the one that serving runs: the target's pass over the anchors and the
verified drafts of R rows, acceptance, and the drafter's context. Drafting is timed apart.
"""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax
from dspark_jax.core.errors import UserError
from dspark_jax.core.progress import progress
from dspark_jax.core.sharding import place
from dspark_jax.decoding.flat import Rows, draft_rows, empty_rows, flat_round
from dspark_jax.decoding.rounds import draft_head
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.verify import Reason
from dspark_jax.models.drafters import AnyDrafter
from dspark_jax.models.target import Target
from dspark_jax.scheduling.policy import Policy, default_sizes
from dspark_jax.scheduling.step_costs import BatchCosts, StepCosts


def measure_steps(
    target: Target,
    drafter: AnyDrafter,
    *,
    target_name: str,
    batches: Sequence[int] = (1,),
    context: int = 256,
    capacity: int = 0,
    sizes: Sequence[int] = (),
    repeats: int = 9,
    temperature: float = 0.0,
) -> StepCosts:
    """Times every size of step for every number of rows.

    Args:
      context: tokens behind every row.
      capacity: tokens that a row has room for; 0 = no more than it needs.
      sizes: of the target's pass, rising; () = `policy.default_sizes`.

    The sizes take turns, so that a slow spell of the machine hits all alike; compiling and the
    first call are left out. What the caches hold is zeros, which costs the same.

    Raises:
      UserError: packed steps need a mesh whose batch axis has one device.
    """
    mesh = jax.sharding.get_mesh().shape
    if mesh["fsdp"] > 1:
        raise UserError(
            f"costs are measured on one device or with tp alone, not fsdp={mesh['fsdp']}"
        )
    proposals = drafter.config.num_proposals
    measured = []
    for rows in sorted(set(batches)):
        tokens = tuple(sizes or default_sizes(rows, proposals))
        room = capacity or context + proposals + 1
        times = _batch(target, drafter, rows, tokens, context, room, repeats, temperature)
        measured.append(times)
    return StepCosts(
        batches=tuple(measured),
        device=jax.devices()[0].device_kind,
        devices=mesh["fsdp"] * mesh["tp"],
        target=target_name,
        dtype=str(jnp.dtype(target.config.dtype)),
        proposals=proposals,
        context=context,
        temperature=temperature,
        repeats=repeats,
        jax=jax.__version__,
        dspark_jax=dspark_jax.__version__,
    )


def _batch(
    target: Target,
    drafter: AnyDrafter,
    count: int,
    sizes: Sequence[int],
    context: int,
    capacity: int,
    repeats: int,
    temperature: float,
) -> BatchCosts:
    proposals = drafter.config.num_proposals

    def column(value, dtype=np.int32):
        return place(np.full(count, value, dtype), "batch")

    def again(rows: Rows) -> Rows:
        """As before the step: `context` tokens behind every row, and room for more."""
        caches = {
            name: dataclasses.replace(getattr(rows, name), length=column(context))
            for name in ("target_cache", "draft_cache")
        }
        numbers = {"emitted": column(0), "limit": column(proposals + 2)}
        return dataclasses.replace(
            rows, **caches, **numbers, anchor=column(0), reason=column(Reason.RUNNING)
        )

    rows = empty_rows(target, drafter, rows=count, capacity=capacity)
    params = SamplingParams.make(count, temperature, seeds=list(range(count)))
    params = jax.tree.map(lambda x: place(x, "batch"), params)
    everyone, head = column(True, bool), draft_head(target, drafter)
    stop_ids = jnp.full((1,), -1, jnp.int32)
    policy, zero = Policy("fixed", proposals), jnp.zeros((), jnp.int32)

    def draft():
        options = (policy, zero, jnp.zeros(()))
        given = drafter, head, again(rows), everyone, params
        return draft_rows(*given, *options, sizes=tuple(sizes))[0]

    drafts = draft()
    lengths, live = {}, {}
    for size in sizes:
        lengths[size] = place(_spread(max(size - count, 0), count).astype(np.int32), "batch")
        live[size] = place(np.arange(count) < size, "batch")
    plain = [size for size in sizes if size <= count]
    cases = [(0, None), *((size, drafts) for size in sizes), *((size, None) for size in plain)]
    seconds: dict[int, list[float]] = {case: [] for case in range(len(cases))}
    with progress(total=repeats + 1, desc=f"costs of {count} rows", unit="turn") as bar:
        for repeat in range(repeats + 1):
            for case, (size, proposed) in enumerate(cases):
                rows = jax.block_until_ready(again(rows))
                began = time.perf_counter()
                if size:
                    given = rows, proposed, lengths[size], live[size], params, stop_ids
                    rows, out = flat_round(target, drafter, head, *given, size=size)
                    jax.block_until_ready((rows, out))
                else:
                    jax.block_until_ready(draft())
                if repeat:  # the first turn compiles
                    seconds[case].append(time.perf_counter() - began)
            bar.update()
    medians = [statistics.median(times) for times in seconds.values()]
    return BatchCosts(
        rows=count,
        tokens=tuple(sizes),
        seconds=tuple(medians[1 : 1 + len(sizes)]),
        draft_seconds=medians[0],
        plain_tokens=tuple(plain),
        plain_seconds=tuple(medians[1 + len(sizes) :]),
    )


def _spread(total: int, rows: int) -> np.ndarray:
    """`total` over the rows as evenly as it goes: i[rows]."""
    return total // rows + (np.arange(rows) < total % rows)
