"""The loss over the vocabulary of one device's rows: which rows share a chunk, and a chunk's terms.

Read vocab_loss.py first. Letters here: N rows and U positions of the device, all batch entries
together; C rows and P positions of a chunk.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from dspark_jax.kernels import vocab_loss_mosaic, vocab_loss_triton, vocab_loss_xla
from dspark_jax.kernels.vocab_loss_xla import Chunk, Options, Slopes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What the loss is of, flat."""

    hidden: Array  # [N, D]
    latent: Array | None  # f32[N, R], or [U, R] if shared
    teacher: Array  # [U, D]
    lse: Array | None  # f32[U]
    best: Array | None  # i32[U]
    at: Array  # i32[N], each row's position
    labels: Array | None  # i32[N]
    weights: Array  # f32[N]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Chunks of rows that count, ordered by position; one past the end = nothing there."""

    rows: Array  # i32[K, C]
    positions: Array  # i32[K, P]
    spot: Array  # i32[K, C], which of the chunk's positions is each row's
    count: Array  # i32[], chunks that hold anything
    inverse: Array  # i32[N], where each row is in [K * C]
    shared: bool = dataclasses.field(metadata={"static": True})


def chunk_shape(rows: int, positions: int, chunk: int) -> tuple[int, int, bool]:
    """Rows and positions of a chunk, and whether rows share positions.

    n rows that fall on U positions at random meet u = U (1 - exp(-n / U)) of them. What depends on
    the position alone is computed once for each if that is a fifth less work on it, u < 0.8 n. A
    chunk then has room for 1.15 u / n positions a row: it ends early where rows share less.
    """
    size = max(min(chunk, rows), 1)
    met = positions * (1 - math.exp(-rows / positions)) / rows if rows and positions else 1.0
    room = 8 * math.ceil(1.15 * met * size / 8 + 1)
    if met >= 0.8 or room >= size:
        return size, size, False
    return size, room, True


def make_plan(at: Array, live: Array, positions: int, chunk: int) -> Plan:
    """Which rows each chunk takes.

    Args:
      at: i32[N]; live: bool[N], rows that count; positions: U.
    """
    n = at.shape[0]
    size, room, shared = chunk_shape(n, positions, chunk)
    most = -(-n // size) + (-(-positions // (room - 1)) if shared else 0)
    order = jnp.argsort(jnp.where(live, at if shared else 0, positions))  # stable
    total = live.sum()
    inside = jnp.arange(n) < total
    sorted_at = at[order]
    fresh = jnp.where(inside, sorted_at != jnp.roll(sorted_at, 1), False).at[0].set(True)
    rank = jnp.cumsum(fresh) - 1  # of a row's position among those that are met

    def cut(start, _):
        end = jnp.minimum(start + size, total)
        if shared:
            first = rank[jnp.minimum(start, n - 1)]
            end = jnp.minimum(end, jnp.searchsorted(rank, first + room))
        return end, (start, end)

    _, (starts, ends) = jax.lax.scan(cut, jnp.zeros_like(total), None, length=most)
    slots = starts[:, None] + jnp.arange(size)
    taken = slots < ends[:, None]
    slots = jnp.minimum(slots, n - 1)
    rows = jnp.where(taken, order[slots], n)
    inverse = jnp.full(n, most * size, jnp.int32)
    inverse = inverse.at[rows.reshape(-1)].set(jnp.arange(most * size), mode="drop")
    if shared:
        spot = jnp.where(taken, rank[slots] - rank[slots[:, :1]], room)
        which = jnp.arange(most)[:, None]
        places = jnp.full((most, room), positions, jnp.int32)
        places = places.at[which, spot].set(sorted_at[slots], mode="drop")
        spot = jnp.minimum(spot, room - 1)
    else:
        places = jnp.where(taken, sorted_at[slots], positions)
        spot = jnp.broadcast_to(jnp.arange(size), rows.shape)
    return Plan(rows, places, spot, (starts < ends).sum(), inverse, shared)


def chunked_loss(
    rows: Rows, head: Array, w2: Array | None, options: Options, with_grads: bool
) -> tuple[Array, tuple[Array, ...], tuple[Array, Array | None, Array | None] | None]:
    """The device's share of the loss, terms f32[N] each, and gradients for hidden, latent and w2.

    Collectives join devices that hold parts of the vocabulary; sums over rows are left to the
    caller. Rows of weight 0 get terms and gradients of 0.
    """
    positions = rows.teacher.shape[0]
    most = options.chunk
    if options.implementation.startswith("mosaic_tpu"):
        most = min(most, vocab_loss_mosaic.most_rows(rows.hidden.shape[1]))
    plan = make_plan(rows.at, rows.weights > 0, positions, most)
    # Devices go through equally many chunks, else those that have fewer would miss a collective.
    count = _over(jax.lax.pmax, plan.count, options.batch_axes + options.vocab_axes)
    size = plan.rows.shape[1]
    by_position = options.shared_latent and plan.shared

    def take(values: Array | None, index: Array) -> Array | None:
        return values if values is None else values.at[index].get(mode="fill", fill_value=0)

    def body(index: Array, carry):
        loss, kept, d_w2 = carry
        row, place, spot = plan.rows[index], plan.positions[index], plan.spot[index]
        chunk = Chunk(
            hidden=take(rows.hidden, row),
            latent=take(rows.latent, place if options.shared_latent else row),
            teacher=take(rows.teacher, place),
            lse=take(rows.lse, place),
            best=take(rows.best, place),
            labels=take(rows.labels, row),
            weights=take(rows.weights, row),
            spot=spot if plan.shared else None,
            latent_at_spot=by_position,
            most=options.most,
        )
        part, terms, grads = chunk_terms(chunk, head, w2, d_w2, options, with_grads)
        if with_grads:
            *grads, d_w2 = grads
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        kept = jax.tree.map(put, kept, (terms, tuple(grads)))
        return loss + part, kept, d_w2

    def buffer(width: int, like: Array) -> Array:
        return jnp.zeros((plan.rows.shape[0], width, like.shape[-1]), like.dtype)

    kept_terms = tuple(jnp.zeros(plan.rows.shape, jnp.float32) for _ in range(5))
    kept_grads, d_w2 = (), None
    if with_grads:
        wide = plan.positions.shape[1] if by_position else size
        d_latent = None if rows.latent is None else buffer(wide, rows.latent.astype(jnp.float32))
        kept_grads = (buffer(size, rows.hidden), d_latent)
        d_w2 = None if w2 is None else jnp.zeros(w2.shape, jnp.float32)
    start = (jnp.zeros(()), (kept_terms, kept_grads), d_w2)
    with jax.named_scope(f"at_most_{plan.rows.shape[0]}_times"):  # for who counts without running
        loss, (kept_terms, kept_grads), d_w2 = jax.lax.fori_loop(0, count, body, start)

    def whole(kept: Array) -> Array:  # as the rows lay
        return take(kept.reshape(-1, *kept.shape[2:]), plan.inverse)

    terms = tuple(whole(x) for x in kept_terms)
    if not with_grads:
        return loss, terms, None
    d_hidden, d_latent = whole(kept_grads[0]), kept_grads[1]
    if d_latent is not None:
        if by_position:
            d_latent = d_latent.reshape(-1, d_latent.shape[-1])
            d_latent = jax.ops.segment_sum(d_latent, plan.positions.reshape(-1), positions)
        else:
            d_latent = whole(d_latent)
            if options.shared_latent:
                d_latent = jax.ops.segment_sum(d_latent, rows.at, positions)
        d_latent = d_latent.astype(rows.latent.dtype)
    return loss, terms, (d_hidden, d_latent, d_w2)


def chunk_terms(chunk: Chunk, head, w2, d_w2, options: Options, with_grads: bool):
    """Loss, terms f32[C] and gradients (hidden, latent, d_w2 with the chunk's share added).

    Three stages, between which only numbers of rows and positions are known: logits and their
    log-sum-exp; sums over the vocabulary; gradients. Devices that share the vocabulary add up what
    the first two give.
    """
    axes, expand = options.vocab_axes, chunk.expand
    offset = 0
    for axis in axes:
        offset = offset * jax.lax.axis_size(axis) + jax.lax.axis_index(axis)
    offset = offset * head.shape[0]
    # 1. Logits.
    logits, sum_up, gradients = _stages(options.implementation)
    found = logits(chunk, head, w2, options)
    lse = _joined(found.top, found.total, axes)
    top = _over(jax.lax.pmax, found.top, axes)
    own_lse = _joined(found.teacher_top, found.teacher_total, axes)  # of p within `head`
    teacher_top = _over(jax.lax.pmax, found.teacher_top, axes)
    lse_t, best = (own_lse, None) if chunk.lse is None else (chunk.lse, chunk.best)
    first = jnp.where(found.teacher_top == teacher_top, found.teacher_best + offset, 2**30)
    first = _over(jax.lax.pmin, first, axes)
    best = first if best is None else best
    if chunk.lse is not None and options.renormalise:
        lse_t = own_lse
    labels = chunk.labels
    if labels is None:
        labels = expand(first if options.renormalise else best)
    known = labels >= 0

    # 2. Sums.
    def logit(token: Array) -> Array:
        """Each row's, from the device that has it."""
        local = token - offset
        mine = (local >= 0) & (local < head.shape[0])
        value = jnp.take_along_axis(found.z, local[:, None], axis=1, mode="clip")[:, 0]
        return _over(jax.lax.psum, jnp.where(mine, value, 0.0), axes)

    best = expand(best)
    own, at_best = logit(labels), logit(best)
    mass = jnp.ones_like(lse_t)
    if options.renormalise:
        mass = jnp.exp(own_lse - chunk.lse)  # of p over all V tokens, what `head` has
    sums = sum_up(found, chunk, lse, lse_t, mass, options)
    sums = jax.tree.map(lambda x: _over(jax.lax.psum, x, axes), sums)
    within = expand(jnp.exp(own_lse - lse_t))  # of p, this much can be drafted
    ce = jnp.where(known, lse - own, 0.0)
    kl = jnp.zeros_like(ce)
    if options.kl:
        kl = sums.kl + within * (lse - expand(lse_t))
    # Over all V tokens both sum to 1, so the excess above equals the one below, and above there
    # are only tokens that the drafter can propose.
    l1 = 2 * (sums.over_q - sums.over_p)
    l1 = jnp.where(jnp.isnan(lse + expand(lse_t) + within), jnp.nan, l1)  # comparisons hide a NaN
    accept = sums.accept if options.renormalise else 1 - l1 / 2
    match = ((at_best >= top) & (best >= 0)).astype(jnp.float32)
    weight = chunk.weights
    loss = jnp.sum(weight * (options.ce * ce + options.l1 * l1 + options.kl * kl))
    terms = (ce, l1, kl, match, accept)
    if not with_grads:
        return loss, terms, ()
    # 3. d l1 / dz_v = q_v (s_v - sum_u q_u s_u), s = sign(q - p), sum_u q_u s_u = 2 over_q - 1
    hit = jnp.where(known, options.ce * weight, 0.0)
    lean = weight * options.l1
    level = hit - lean * (2 * sums.over_q - 1) + weight * options.kl * within
    slopes = Slopes(level, lean, weight * options.kl, hit, labels - offset)
    d_hidden, d_latent, d_w2 = gradients(found, chunk, head, w2, d_w2, lse, lse_t, slopes, options)
    d_hidden, d_latent = jax.tree.map(lambda x: _over(jax.lax.psum, x, axes), (d_hidden, d_latent))
    return loss, terms, (d_hidden.astype(chunk.hidden.dtype), d_latent, d_w2)


def _stages(implementation: str) -> tuple[Callable, Callable, Callable]:
    module = {
        "xla": vocab_loss_xla,
        "mosaic_tpu": vocab_loss_mosaic,
        "triton": vocab_loss_triton,
    }[implementation.removesuffix("_interpret")]
    stages = (module.logits, module.sums, module.gradients)
    if implementation.endswith("_interpret"):
        return tuple(functools.partial(stage, interpret=True) for stage in stages)
    return stages


def _over(collective: Callable, x: Array, axes: tuple[str, ...]) -> Array:
    return collective(x, axes) if axes else x


def _joined(top: Array, total: Array, axes: tuple[str, ...]) -> Array:
    """log-sum-exp over all devices from each one's largest and sum of exp(x - largest)."""
    if not axes:
        return top + jnp.log(total)
    highest = jax.lax.pmax(top, axes)
    return highest + jnp.log(jax.lax.psum(total * jnp.exp(top - highest), axes))
