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
    z = base = _capped(_dot(chunk.hidden, head, 1), options.softcap)
    zt = _capped(_dot(chunk.teacher, head, 1), options.softcap)
    if chunk.latent is not None:
        bias = _dot(chunk.latent, w2, 1)
        z = z + (chunk.expand(bias) if chunk.latent_at_spot else bias)
    top, top_t = z.max(-1), zt.max(-1)
    ids = jax.lax.broadcasted_iota(jnp.int32, zt.shape, 1)
    return Logits(
        z=z,
        zt=zt,
        base=base if options.softcap else None,
        top=top,
        total=jnp.exp(z - top[:, None]).sum(-1),
        teacher_top=top_t,
        teacher_total=jnp.exp(zt - top_t[:, None]).sum(-1),
        teacher_best=jnp.where(zt == top_t[:, None], ids, zt.shape[-1]).min(-1),
    )


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
    dtype = chunk.hidden.dtype
    d_hidden = _dot(d_base.astype(dtype), head, 0)
    if chunk.latent is None:
        return d_hidden, None, None
    if chunk.latent_at_spot:  # first the sum over the rows of each position
        places = jnp.arange(chunk.latent.shape[0])[:, None]
        here = (places == chunk.spot).astype(dtype)
        d_z = _dot(here, d_z.astype(dtype), 0)
    d_z = d_z.astype(dtype)
    d_latent = _dot(d_z, w2.astype(dtype), 0)
    share = jax.lax.dot_general(
        d_z, chunk.latent.astype(dtype), (((0,), (0,)), ((), ())), None, jnp.float32
    )
    return d_hidden, d_latent, d_w2 + share


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
