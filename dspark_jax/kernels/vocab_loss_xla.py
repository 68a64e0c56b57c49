"""The three stages of a chunk's loss over the vocabulary, in plain XLA, and the types they share.

Each device has its part of the vocabulary; stages give numbers of rows and positions, which
vocab_loss_chunks.py joins between them. Letters: C rows and P positions of the chunk, V the
device's part of the vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Options:
    """Static: the weights of the terms and how they are computed."""

    ce: float
    l1: float
    kl: float
    softcap: float
    renormalise: bool
    shared_latent: bool  # latents are those of positions
    chunk: int
    most: int = 0  # rows at one position; 0 = not known
    implementation: str = "xla"
    batch_axes: tuple[str, ...] = ()  # of the mesh, that rows lie on
    vocab_axes: tuple[str, ...] = ()  # and that the vocabulary lies on


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """C rows and their P positions; without `spot`, row and position are one."""

    hidden: Array  # [C, D]
    latent: Array | None  # f32[C, R]; [P, R] if `latent_at_spot`
    teacher: Array  # [P, D]
    lse: Array | None  # f32[P]
    best: Array | None  # i32[P]
    labels: Array | None  # i32[C]
    weights: Array  # f32[C]
    spot: Array | None  # i32[C], each row's position
    latent_at_spot: bool = dataclasses.field(default=False, metadata={"static": True})
    most: int = dataclasses.field(default=0, metadata={"static": True})  # rows of a position

    def expand(self, values: Array) -> Array:
        """[P, ...] of positions -> [C, ...] of rows."""
        return values if self.spot is None else values.at[self.spot].get(mode="promise_in_bounds")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logits:
    """Of the chunk on this device, after stage 1."""

    z: Array  # f32[C, V], the drafter's
    zt: Array  # f32[P, V], the target's
    base: Array | None  # f32[C, V], z before the bias; only with a soft-cap
    top: Array  # f32[C], the largest of z
    total: Array  # f32[C], sum exp(z - top)
    teacher_top: Array  # f32[P]
    teacher_total: Array  # f32[P]
    teacher_best: Array  # i32[P], the first arg-max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Of the chunk over this device's vocabulary, after stage 2; q and p as in vocab_loss.py."""

    over_q: Array  # f32[C], sum of q where q > p
    over_p: Array  # f32[C], sum of p there
    kl: Array | None  # f32[C], sum p (zt - z)
    accept: Array | None  # f32[C], sum min(q, mass p)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slopes:
    """Numbers of rows that make d loss / d z: q (level +- lean) - kl p, less hit at the label."""

    level: Array  # f32[C]
    lean: Array  # f32[C], + where q > p
    kl: Array  # f32[C]
    hit: Array  # f32[C]
    label: Array  # i32[C], within this device's part; outside it = elsewhere


def logits(chunk: Chunk, head: Array, w2: Array | None, options: Options) -> Logits:
    """Stage 1: logits of rows and positions, and what their log-sum-exp is made of."""
    base, zt, bias = raw_logits(chunk, head, w2, options)
    z = base
    if bias is not None:
        z = z + (chunk.expand(bias) if chunk.latent_at_spot else bias)
    top, top_t = z.max(-1), zt.max(-1)
    # Token ids as float32, exact up to 2^24: the largest of floats is found faster than the least
    # of integers.
    ids = jax.lax.broadcasted_iota(jnp.float32, zt.shape, 1)
    best = -jnp.where(zt == top_t[:, None], -ids, -jnp.inf).max(-1)
    return Logits(
        z=z,
        zt=zt,
        base=base if options.softcap else None,
        top=top,
        total=jnp.exp(z - top[:, None]).sum(-1),
        teacher_top=top_t,
        teacher_total=jnp.exp(zt - top_t[:, None]).sum(-1),
        teacher_best=jnp.minimum(best, zt.shape[1]).astype(jnp.int32),
    )


def raw_logits(
    chunk: Chunk, head: Array, w2: Array | None, options: Options
) -> tuple[Array, Array, Array | None]:
    """Logits before the bias f32[C, V], the target's f32[P, V], and the bias as its latents lie."""
    both = jnp.concatenate([chunk.hidden, chunk.teacher])  # the head is packed for products once
    both = _capped(_dot(both, head, 1), options.softcap)
    rows = chunk.hidden.shape[0]
    bias = None if chunk.latent is None else _dot(chunk.latent, w2, 1)
    return both[:rows], both[rows:], bias


def sums(
    found: Logits, chunk: Chunk, lse: Array, lse_t: Array, mass: Array, options: Options
) -> Sums:
    """Stage 2; lse f32[C] of z, lse_t f32[P] that p is taken with, mass f32[P]."""
    q, p = _probabilities(found, chunk, lse, lse_t)
    over = q > p
    zero = jnp.float32(0)
    pair = jnp.where(over, q, 0.0), jnp.where(over, p, 0.0)
    over_q, over_p = jax.lax.reduce(pair, (zero, zero), _add_pairs, (1,))  # in one pass
    kl = accept = None
    if options.kl:
        kl = jnp.sum(p * (chunk.expand(found.zt) - found.z), axis=-1)
    if options.renormalise:
        accept = jnp.minimum(q, chunk.expand(mass)[:, None] * p).sum(-1)
    return Sums(over_q, over_p, kl, accept)


def gradients(
    found: Logits,
    chunk: Chunk,
    head: Array,
    w2: Array | None,
    d_w2: Array | None,
    lse: Array,
    lse_t: Array,
    slopes: Slopes,
    options: Options,
) -> tuple[Array, Array | None, Array | None]:
    """Stage 3: f32[C, D], f32 like the latents, and d_w2 with the chunk's share added."""
    q, p = _probabilities(found, chunk, lse, lse_t)
    lean = slopes.lean[:, None]
    d_z = q * (slopes.level[:, None] + jnp.where(q > p, lean, -lean))
    if options.kl:
        d_z = d_z - slopes.kl[:, None] * p
    ids = jax.lax.broadcasted_iota(jnp.int32, d_z.shape, 1)
    d_z = d_z - jnp.where(ids == slopes.label[:, None], slopes.hit[:, None], 0.0)
    d_base = d_z
    if options.softcap:
        d_base = d_z * (1.0 - jnp.square(found.base / options.softcap))
    return multiply_back(chunk, head, w2, d_w2, d_base, d_z)


def multiply_back(
    chunk: Chunk, head: Array, w2: Array | None, d_w2: Array | None, d_base: Array, d_z: Array
) -> tuple[Array, Array | None, Array | None]:
    """Gradients from d loss / d logits [C, V], before the bias and with it."""
    dtype = chunk.hidden.dtype
    d_hidden = _dot(d_base.astype(dtype), head, 0)
    if chunk.latent is None:
        return d_hidden, None, None
    if chunk.latent_at_spot:
        d_z = _by_position(chunk, d_z)
    d_z = d_z.astype(dtype)
    d_latent = _dot(d_z, w2.astype(dtype), 0)
    share = jax.lax.dot_general(
        d_z, chunk.latent.astype(dtype), (((0,), (0,)), ((), ())), None, jnp.float32
    )
    return d_hidden, d_latent, d_w2 + share


def _by_position(chunk: Chunk, d_z: Array) -> Array:
    """The sum f32[P, V] over the rows [C, V] of each position, which follow one another."""
    places = jnp.arange(chunk.latent.shape[0])
    if not chunk.most:
        here = (places[:, None] == chunk.spot).astype(d_z.dtype)
        return _dot(here, d_z, 0)
    first = jnp.searchsorted(chunk.spot, places)
    count = jnp.searchsorted(chunk.spot, places, side="right") - first
    total = jnp.zeros((len(places), d_z.shape[1]), jnp.float32)
    for k in range(chunk.most):  # one pass that reads rows, where a product reads all for each
        row = d_z.at[jnp.minimum(first + k, len(d_z) - 1)].get(mode="promise_in_bounds")
        total = total + jnp.where((k < count)[:, None], row, 0)
    return total


def _probabilities(found: Logits, chunk: Chunk, lse: Array, lse_t: Array) -> tuple[Array, Array]:
    """q and p, f32[C, V] each, from the exponentials that stage 1 has taken."""
    q = jnp.exp(found.z - found.top[:, None]) * jnp.exp(found.top - lse)[:, None]
    p = jnp.exp(found.zt - found.teacher_top[:, None])
    p = chunk.expand(p) * chunk.expand(jnp.exp(found.teacher_top - lse_t))[:, None]
    return q, p


def _dot(a: Array, b: Array, axis: int) -> Array:
    """a [M, K] times b over its `axis`, summed in float32."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), None, jnp.float32)


def _capped(values: Array, cap: float) -> Array:
    return cap * jnp.tanh(values / cap) if cap else values


def _add_pairs(x: tuple[Array, Array], y: tuple[Array, Array]) -> tuple[Array, Array]:
    return x[0] + y[0], x[1] + y[1]
