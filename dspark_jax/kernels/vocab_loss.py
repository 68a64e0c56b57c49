"""Cross-entropy and L1 over the vocabulary, with gradients, without logits of all rows at once.

`vocab_loss` is equivalent to

    z = cap(hidden @ head.T) + latent @ w2.T       # drafter's logits
    p = softmax(cap(teacher @ head.T)); q = softmax(z)
    ce = logsumexp(z) - z[label]; l1 = sum(abs(q - p)); kl = sum(p * log(p / q))
    loss = sum(weight * (ce_weight * ce + l1_weight * l1 + kl_weight * kl))

where cap(x) = softcap * tanh(x / softcap) for targets that cap their logits (Gemma), else x.
The gradient of a row needs only that row's logits, so it is computed together with the loss while
they exist: a scan over chunks keeps [B, chunk, V] and nothing is computed twice.

With a pruned vocabulary `head` has the V_d rows that the drafter can propose and p is the target's
distribution over all V tokens: what it puts outside is out of reach, counts as lost in l1 and so
in the acceptance 1 - l1 / 2, and a label there has no cross-entropy. `renormalise` takes p over the
V_d tokens alone instead; the acceptance stays the one over V.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dspark_jax.core.sharding import einsum, gather_rows, spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VocabTerms:
    """Per-row results; no gradient flows through them."""

    ce: jax.Array  # f32[B, N]
    l1: jax.Array  # f32[B, N], sum |q - p|: twice the total variation
    kl: jax.Array  # f32[B, N], the part of KL(p || q) within the drafter's vocabulary
    match: jax.Array  # f32[B, N], 1 where both arg-maxima agree
    accept: jax.Array  # f32[B, N], sum min(p, q) with p over all V tokens, renormalised or not


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Teacher:
    """The target's distribution for each row's token.

    For a pruned vocabulary the last two are given, of the whole vocabulary; else they are None.
    """

    hidden: jax.Array  # [B, N, D], frozen
    lse: jax.Array | None = None  # f32[B, N], log-sum-exp of its logits
    best: jax.Array | None = None  # i32[B, N], its arg-max as a draft id, -1 if it has none


def vocab_loss_reference(
    hidden,
    latent,
    w2,
    head,
    teacher: Teacher,
    labels,
    weights,
    *,
    ce_weight: float,
    l1_weight: float,
    kl_weight: float = 0.0,
    softcap: float = 0.0,
    renormalise: bool = False,
) -> tuple[jax.Array, VocabTerms]:
    """The same in plain jnp with all logits in memory; differentiable by jax.grad."""
    z = jnp.einsum("bnd,vd->bnv", hidden, head, preferred_element_type=jnp.float32)
    z = softcap * jnp.tanh(z / softcap) if softcap else z
    if latent is not None:
        z = z + jnp.einsum("bnr,vr->bnv", latent, w2, preferred_element_type=jnp.float32)
    zt = jnp.einsum("bnd,vd->bnv", teacher.hidden, head, preferred_element_type=jnp.float32)
    zt = softcap * jnp.tanh(zt / softcap) if softcap else zt
    whole = jax.nn.logsumexp(zt, axis=-1) if teacher.lse is None else teacher.lse
    best = zt.argmax(-1) if teacher.best is None else teacher.best
    lse = jax.nn.logsumexp(zt, axis=-1) if renormalise else whole
    if labels is None:
        labels = zt.argmax(-1) if renormalise else best
    log_p, log_q = zt - lse[..., None], jax.nn.log_softmax(z)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    own = jnp.take_along_axis(z, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    ce = jnp.where(labels < 0, 0.0, jax.nn.logsumexp(z, axis=-1) - own)
    l1 = jnp.abs(q - p).sum(-1) + jnp.maximum(1 - p.sum(-1), 0.0)
    kl = jnp.sum(p * (log_p - log_q), axis=-1)
    match = (z.argmax(-1) == best).astype(jnp.float32)
    accept = jnp.minimum(q, jnp.exp(zt - whole[..., None])).sum(-1)
    loss = jnp.sum(weights * (ce_weight * ce + l1_weight * l1 + kl_weight * kl))
    return loss, jax.lax.stop_gradient(VocabTerms(ce, l1, kl, match, accept))


def vocab_loss(
    hidden: jax.Array,
    latent: jax.Array | None,
    w2: jax.Array | None,
    head: jax.Array,
    teacher: Teacher,
    labels: jax.Array | None,
    weights: jax.Array,
    *,
    ce_weight: float,
    l1_weight: float,
    kl_weight: float = 0.0,
    softcap: float = 0.0,
    renormalise: bool = False,
    chunk: int = 256,
) -> tuple[jax.Array, VocabTerms]:
    """Weighted loss of N rows per batch entry, and the terms of each row.

    Args:
      hidden: [B, N, D] the drafter's final hidden; latent: f32[B, N, R] or None; w2: f32[V_d, R].
      head: [V_d, D], frozen; teacher: what the target says of the same tokens.
      labels: i32[B, N] draft ids, -1 = the data's token is none; None = what p says is most
        probable (no label where the drafter cannot propose that). weights: f32[B, N], 0 = the row
        has no influence, whatever it holds.
      ce_weight, l1_weight, kl_weight: weights of the terms.
      softcap: of the target's logits and of the drafter's before `latent`; 0 = none.
      renormalise: p is over the V_d tokens of `head` alone; of influence only where it is pruned.
      chunk: about so many rows have logits at a time.

    Returns:
      Scalar loss, differentiable in hidden, latent and w2, and the unweighted terms.
    """
    live = weights[..., None] > 0
    hidden = jnp.where(live, hidden, 0)
    renormalise = renormalise and teacher.lse is not None
    if labels is None and teacher.best is not None and not renormalise:
        labels = teacher.best
    lse = None if teacher.lse is None else jnp.where(live[..., 0], teacher.lse, 0)
    teacher = Teacher(jnp.where(live, teacher.hidden, 0), lse, teacher.best)
    latent = None if latent is None else jnp.where(live, latent, 0)
    options = (ce_weight, l1_weight, kl_weight, softcap, renormalise, chunk)
    return _loss(hidden, latent, w2, head, teacher, labels, weights, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _loss(hidden, latent, w2, head, teacher, labels, weights, options):
    loss, terms, _ = _scan(hidden, latent, w2, head, teacher, labels, weights, options, False)
    return loss, terms


def _forward(hidden, latent, w2, head, teacher, labels, weights, options):
    loss, terms, grads = _scan(hidden, latent, w2, head, teacher, labels, weights, options, True)
    return (loss, terms), grads


def _backward(options, grads, cotangent):
    scale = cotangent[0]
    d_hidden, d_latent, d_w2 = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    return d_hidden, d_latent, d_w2, None, None, None, None


_loss.defvjp(_forward, _backward)


def _scan(hidden, latent, w2, head, teacher, labels, weights, options, with_grads):
    ce_weight, l1_weight, kl_weight, softcap, renormalise, chunk = options
    batch, rows, _ = hidden.shape
    size = max(min(chunk // batch, rows), 1)
    count = -(-rows // size)

    def chunked(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, 0), (0, count * size - rows)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, count, size, *x.shape[2:]), 1, 0)

    flat = ("batch", None)
    head_c = head.astype(hidden.dtype)

    def body(carry, xs):
        loss, d_w2 = carry
        h, e, t, label, weight = xs
        vocab_out = (*flat, "vocab")
        f32 = {"preferred_element_type": jnp.float32}
        z, slope = _capped(einsum("bnd,vd->bnv", h, head_c, out=vocab_out, **f32), softcap)
        zt, _ = _capped(einsum("bnd,vd->bnv", t.hidden, head_c, out=vocab_out, **f32), softcap)
        label = zt.argmax(-1) if label is None else label
        known = label >= 0
        label = jnp.maximum(label, 0)
        rows_head = gather_rows(head_c, label, ("batch", None, None))
        own, own_slope = _capped(jnp.einsum("bnd,bnd->bn", h, rows_head, **f32), softcap)
        if e is not None:
            z = z + einsum("bnr,vr->bnv", e, w2, out=vocab_out, **f32)
            rows_w2 = gather_rows(w2, label, ("batch", None, None))
            own = own + jnp.einsum("bnr,bnr->bn", e, rows_w2)
        top = z.max(-1, keepdims=True)
        q = jnp.exp(z - top)
        total = q.sum(-1, keepdims=True)
        q, lse = q / total, (top + jnp.log(total))[..., 0]
        if t.lse is None or renormalise:
            top_t = zt.max(-1, keepdims=True)
            p = jnp.exp(zt - top_t)
            total_t = p.sum(-1, keepdims=True)
            p, lse_t = p / total_t, (top_t + jnp.log(total_t))[..., 0]
            within = jnp.ones_like(lse_t)
        else:
            lse_t = t.lse
            p = jnp.exp(zt - lse_t[..., None])
            within = p.sum(-1)  # of the target's distribution, this much can be drafted
        best = zt == top_t if t.lse is None else jnp.arange(z.shape[-1]) == t.best[..., None]
        ce = jnp.where(known, lse - own, 0.0)
        kl = jnp.zeros_like(ce)
        if kl_weight:
            kl = jnp.sum(p * (zt - z), axis=-1) + within * (lse - lse_t)
        over = q > p
        over_q, over_p = jnp.where(over, q, 0.0).sum(-1), jnp.where(over, p, 0.0).sum(-1)
        # Over all V tokens both sum to 1, so the excess above equals the one below, and above
        # there are only tokens that the drafter can propose.
        l1 = 2 * (over_q - over_p)
        sound = (total[..., 0] > 0) & ~jnp.isnan(lse_t + within)
        l1 = jnp.where(sound, l1, jnp.nan)  # comparisons hide a NaN
        accept = 1 - l1 / 2
        if renormalise:
            mass = jnp.exp(lse_t - t.lse)[..., None]  # of p over all V tokens, what `head` has
            accept = jnp.minimum(q, mass * p).sum(-1)
        # The drafter's logit where the target's is largest, against the drafter's largest.
        match = (jnp.where(best, z, -jnp.inf).max(-1) >= top[..., 0]).astype(jnp.float32)
        terms = ce_weight * ce + l1_weight * l1 + kl_weight * kl
        loss = loss + jnp.sum(weight * terms)
        if not with_grads:
            return (loss, d_w2), ((ce, l1, kl, match, accept), None)
        # d l1 / dz_v = q_v (s_v - sum_u q_u s_u), s = sign(q - p), sum_u q_u s_u = 2 over_q - 1
        w, hit = weight[..., None], jnp.where(known, ce_weight * weight, 0.0)[..., None]
        mean_sign = 2 * over_q[..., None] - 1
        d_z = q * (hit + w * l1_weight * (jnp.where(over, 1.0, -1.0) - mean_sign))
        if kl_weight:
            d_z = d_z + w * kl_weight * (within[..., None] * q - p)
        d_base = (d_z * slope).astype(h.dtype)
        d_z = d_z.astype(h.dtype)
        d_h = einsum("bnv,vd->bnd", d_base, head_c, out=(*flat, None), **f32)
        d_h = d_h - hit * (own_slope[..., None] if softcap else own_slope) * rows_head
        d_e = None
        if e is not None:
            d_e = einsum("bnv,vr->bnr", d_z, w2.astype(h.dtype), out=(*flat, None), **f32)
            d_e = d_e - hit * rows_w2
            d_w2 = d_w2 + einsum("bnv,bnr->vr", d_z, e.astype(h.dtype), out=("vocab", None), **f32)
            flat_e = (-hit * e).reshape(-1, e.shape[-1])
            d_w2 = _add_rows(d_w2, label.reshape(-1), flat_e)
            d_e = d_e.astype(e.dtype)
        return (loss, d_w2), ((ce, l1, kl, match, accept), (d_h.astype(h.dtype), d_e))

    start = None
    if latent is not None and with_grads:
        start = jnp.zeros(w2.shape, jnp.float32, out_sharding=spec("vocab", None))
    xs = jax.tree.map(chunked, (hidden, latent, teacher, labels, weights))
    (loss, d_w2), (terms, grads) = jax.lax.scan(body, (jnp.zeros(()), start), xs)

    def whole(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, count * size, *x.shape[3:])[:, :rows]

    terms = VocabTerms(*(whole(x) for x in terms))
    if not with_grads:
        return loss, terms, None
    d_hidden, d_latent = jax.tree.map(whole, grads)
    d_w2 = None if d_w2 is None else d_w2.astype(w2.dtype)
    # With one row and one chunk a reshape forgets which axis was sharded.
    grads = jax.tree.map(_placed_like, (d_hidden, d_latent, d_w2), (hidden, latent, w2))
    return loss, terms, grads


def _capped(logits: jax.Array, cap: float) -> tuple[jax.Array, jax.Array | float]:
    """Capped logits and their derivative by the logits; both cost nothing without a cap."""
    if not cap:
        return logits, 1.0
    tanh = jnp.tanh(logits / cap)
    return cap * tanh, 1.0 - tanh * tanh


def _placed_like(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.sharding.reshard(x, jax.typeof(y).sharding.spec)


def _add_rows(table: jax.Array, index: jax.Array, rows: jax.Array) -> jax.Array:
    """table[index] += rows, for a table sharded over its rows and rows sharded over the batch."""
    return jax.sharding.auto_axes(
        lambda table, index, rows: table.at[index].add(rows),
        out_sharding=jax.typeof(table).sharding.spec,
    )(table, index, rows)
