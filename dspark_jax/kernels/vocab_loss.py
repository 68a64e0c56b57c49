"""Cross-entropy and L1 over the vocabulary, with gradients, without logits of all rows at once.

`vocab_loss` is equivalent to

    z = cap(hidden @ head.T) + latent @ w2.T       # drafter's logits
    p = softmax(cap(teacher[at] @ head.T)); q = softmax(z)
    ce = logsumexp(z) - z[label]; l1 = sum(abs(q - p)); kl = sum(p * log(p / q))
    loss = sum(weight * (ce_weight * ce + l1_weight * l1 + kl_weight * kl))

where cap(x) = softcap * tanh(x / softcap) for targets that cap their logits (Gemma), else x.
The gradient of a row needs only that row's logits, so it is computed together with the loss while
they exist: a loop over chunks of rows (vocab_loss_chunks.py) keeps [chunk, V] and computes nothing
twice. Rows of weight 0 are in no chunk and cost nothing.

Work, in products of matrices: for n rows on u different positions, of D hidden and R latent dims,

    4 n V D                    z = hidden @ head.T and d_hidden = d_z @ head
    2 u V D                    teacher @ head.T, which depends on the position alone
    6 u V R  (6 n V R)         bias, d_latent and d_w2 of latents by position (by row)

so 512 anchors of 7 slots on 512 positions at D = 576, R = 256 take 1.9 times less than the
6 n V (D + R) of each row by itself. `chunk_shape` says from the shapes whether rows share.

With a pruned vocabulary `head` has the V_d rows that the drafter can propose and p is the target's
distribution over all V tokens: what it puts outside is out of reach, counts as lost in l1 and so
in the acceptance 1 - l1 / 2, and a label there has no cross-entropy. `renormalise` takes p over the
V_d tokens alone instead; the acceptance stays the one over V.

A vocabulary sharded over a mesh axis is joined chunk by chunk: largest and sum of both
distributions, the sums over the vocabulary, the logits of label and target's token from the device
that has them, and the gradients of hidden states and latents.
"""

import dataclasses
import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dspark_jax.core.sharding import platform
from dspark_jax.kernels.vocab_loss_chunks import Rows, chunked_loss
from dspark_jax.kernels.vocab_loss_xla import Options

# "..._interpret" runs the kernels of TPU or GPU as plain XLA on any machine.
Implementation = Literal["xla", "mosaic_tpu", "triton", "mosaic_tpu_interpret", "triton_interpret"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VocabTerms:
    """Per-row results; no gradient flows through them. 0 in rows of weight 0."""

    ce: jax.Array  # f32[B, N]
    l1: jax.Array  # f32[B, N], sum |q - p|: twice the total variation
    kl: jax.Array  # f32[B, N], the part of KL(p || q) within the drafter's vocabulary
    match: jax.Array  # f32[B, N], 1 where both arg-maxima agree
    accept: jax.Array  # f32[B, N], sum min(p, q) with p over all V tokens, renormalised or not


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Teacher:
    """The target's distributions at U positions of each batch entry, and which is each row's.

    For a pruned vocabulary `lse` and `best` are given, of the whole vocabulary; else they are None.
    `most`, if it is known, is the largest number of live rows that any position can have.
    """

    hidden: jax.Array  # [B, U, D], frozen
    lse: jax.Array | None = None  # f32[B, U], log-sum-exp of its logits
    best: jax.Array | None = None  # i32[B, U], its arg-max as a draft id, -1 if it has none
    at: jax.Array | None = None  # i32[B, N], the position of each row; None = U is N, one each
    most: int = dataclasses.field(default=0, metadata={"static": True})  # rows of one position


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
    shared_latent: bool = False,
) -> tuple[jax.Array, VocabTerms]:
    """The same in plain jnp with all logits in memory; differentiable by jax.grad."""
    if teacher.at is not None:
        take = jax.vmap(lambda values, index: values[index])
        at, latent = teacher.at, take(latent, teacher.at) if shared_latent else latent
        parts = (teacher.hidden, teacher.lse, teacher.best)
        teacher = Teacher(*(x if x is None else take(x, at) for x in parts))
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
    shared_latent: bool = False,
    chunk: int = 256,
    implementation: Implementation | None = None,
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
      shared_latent: latent is f32[B, U, R], that of the position `teacher.at` (vanilla heads, whose
        previous token is the one at that position).
      chunk: at most so many rows of a device have logits at a time.
      implementation: of a chunk's stages; None takes the kernels of the default backend (CPU:
        "xla") where they support the operands, else "xla".

    Returns:
      Scalar loss, differentiable in hidden, latent and w2, and the unweighted terms.

    Raises:
      NotImplementedError: if kernels asked for by name do not support the operands.
    """
    options = Options(
        ce=ce_weight,
        l1=l1_weight,
        kl=kl_weight,
        softcap=softcap,
        renormalise=renormalise and teacher.lse is not None,
        shared_latent=shared_latent,
        chunk=chunk,
        most=teacher.most,
        implementation=_choose(implementation, hidden, head, teacher),
    )
    if teacher.at is None:
        at = jnp.broadcast_to(jnp.arange(weights.shape[1]), weights.shape)
        teacher = dataclasses.replace(teacher, at=at)
    operands = (hidden, latent, w2, head, teacher, labels, weights)
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return _loss(*operands, options, None)
    rows, vocab = jax.typeof(hidden).sharding.spec[0], jax.typeof(head).sharding.spec[0]
    specs = (P(rows), P(rows), P(vocab), P(vocab), P(rows), P(rows), P(rows))
    options = dataclasses.replace(options, batch_axes=_names(rows), vocab_axes=_names(vocab))
    operands = [_reshard(x, spec) for x, spec in zip(operands, specs)]
    return _loss(*operands, options, specs)


def _choose(implementation: Implementation | None, hidden, head, teacher) -> Implementation:
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(f"implementation {implementation!r} is none of {get_args(Implementation)}")
    axis_types = set(jax.sharding.get_abstract_mesh().axis_types)
    obstacle = None
    if any(x.dtype not in (jnp.float32, jnp.bfloat16) for x in (hidden, head, teacher.hidden)):
        obstacle = f"float32 and bfloat16 only, not {hidden.dtype}, {head.dtype}"
    elif 0 in (hidden.size, head.size):
        obstacle = f"nothing to do for hidden {hidden.shape} and head {head.shape}"
    elif AxisType.Auto in axis_types or len(axis_types) > 1:
        obstacle = "the axes of the mesh must be explicit, or all manual (inside a shard_map)"
    if obstacle and implementation not in (None, "xla"):
        raise NotImplementedError(f"vocabulary loss by {implementation}: {obstacle}")
    if obstacle:
        return "xla"
    return implementation or {"tpu": "mosaic_tpu", "gpu": "triton"}.get(platform(), "xla")


def _reshard(tree, spec: P):
    return jax.tree.map(lambda x: jax.reshard(x, spec), tree)


def _names(spec: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return tuple(jax.tree.leaves(spec))  # the mesh axes in it


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _loss(hidden, latent, w2, head, teacher, labels, weights, options, specs):
    operands = (hidden, latent, w2, head, teacher, labels, weights)
    loss, terms, _ = _on_devices(operands, options, specs, with_grads=False)
    return loss, terms


def _forward(hidden, latent, w2, head, teacher, labels, weights, options, specs):
    operands = (hidden, latent, w2, head, teacher, labels, weights)
    loss, terms, grads = _on_devices(operands, options, specs, with_grads=True)
    return (loss, terms), grads


def _backward(options, specs, grads, cotangent):
    scale = cotangent[0]
    d_hidden, d_latent, d_w2 = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    return d_hidden, d_latent, d_w2, None, None, None, None


_loss.defvjp(_forward, _backward)


def _on_devices(operands, options: Options, specs, with_grads: bool):
    """Each device's rows and part of the vocabulary; the sums over rows and devices."""
    body = functools.partial(_on_device, options=options, with_grads=with_grads)
    if specs is None:
        return body(*operands)
    rows, vocab = specs[0], specs[2]
    out_specs = (P(), rows, (rows, rows, vocab))
    return jax.shard_map(body, in_specs=specs, out_specs=out_specs, check_vma=False)(*operands)


def _on_device(
    hidden, latent, w2, head, teacher, labels, weights, *, options: Options, with_grads: bool
):
    batch, n, _ = hidden.shape
    positions = teacher.hidden.shape[1]

    def flat(x):
        return None if x is None else x.reshape(-1, *x.shape[2:])

    at = teacher.at + positions * jnp.arange(batch)[:, None]
    rows = Rows(
        hidden=flat(hidden),
        latent=flat(latent),
        teacher=flat(teacher.hidden),
        lse=flat(teacher.lse),
        best=flat(teacher.best),
        at=flat(at),
        labels=flat(labels),
        weights=flat(weights),
    )
    loss, terms, grads = chunked_loss(rows, head.astype(hidden.dtype), w2, options, with_grads)
    axes = options.batch_axes
    loss = jax.lax.psum(loss, axes) if axes else loss
    terms = VocabTerms(*(x.reshape(batch, n) for x in terms))
    if not with_grads:
        return loss, terms, (None, None, None)
    d_hidden, d_latent, d_w2 = grads
    d_hidden = d_hidden.reshape(hidden.shape)
    if d_latent is not None:
        d_latent = d_latent.reshape(latent.shape)
        d_w2 = jax.lax.psum(d_w2, axes) if axes else d_w2
        d_w2 = d_w2.astype(w2.dtype)
    return loss, terms, (d_hidden, d_latent, d_w2)
