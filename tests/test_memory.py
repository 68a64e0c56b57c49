"""What memory is traded for: layers computed again, float32 weights behind bfloat16 computation, an
average of the weights.

pytest tests/test_memory.py
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_step import LOSS, eight_rows
from tiny_drafter import (
    HIDDEN,
    first_micro,
    make_batch,
    make_drafter,
    make_head,
    make_row,
    make_shape,
    random_weights,
)

from dspark_jax.core.config import RunConfig, TrainConfig, from_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import abstract, make_mesh, place
from dspark_jax.core.trees import named, trainable
from dspark_jax.models.drafters import new_drafter
from dspark_jax.models.target import TargetHead
from dspark_jax.training.anchors import make_blocks, sample_anchors, slot_weights
from dspark_jax.training.losses import dspark_loss
from dspark_jax.training.step import Recipe, TrainState, make_optimizer, state_of, train_step


@pytest.fixture(scope="module", autouse=True)
def mesh():
    with jax.set_mesh(make_mesh(1, 1)):
        yield


@functools.cache
def rows_and_weights(dtype: str = "float32"):
    shape = make_shape(num_layers=2, dtype=dtype)
    return make_batch(eight_rows()), random_weights(shape), shape


def loss_of(batch, shape, remat: str):
    """The loss of one micro-batch as a function of the trained arrays."""
    head = make_head()
    micro = first_micro(batch)
    chosen = sample_anchors(jax.random.key(3), micro.loss_mask, micro.documents, micro.rows, 4)
    blocks = make_blocks(*chosen, micro.loss_mask, micro.documents, shape.config, LOSS)
    many = jax.tree.map(lambda x: x[None], blocks)
    weights = first_micro(slot_weights(many, batch.loss_mask, shape.config, LOSS))

    def loss(drafter):
        return dspark_loss(drafter, head, micro, blocks, weights, weights.unit, LOSS, 16, remat)[0]

    return loss


def kept_bytes(batch, drafter, remat: str) -> int:
    """What the forward pass hands to the backward pass."""
    loss = loss_of(batch, drafter.shape, remat)
    backward = jax.eval_shape(lambda drafter: jax.vjp(loss, drafter)[1], drafter)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(backward))


def test_rematerialisation_keeps_less_and_changes_nothing():
    batch, weights, shape = rows_and_weights()
    drafter = make_drafter(shape, weights)
    kept, found = {}, {}
    for remat in ("none", "dots", "layer"):
        kept[remat] = kept_bytes(batch, drafter, remat)
        found[remat] = jax.jit(jax.value_and_grad(loss_of(batch, shape, remat)))(drafter)
    assert kept["layer"] < 0.8 * kept["dots"] and kept["dots"] < 0.8 * kept["none"], kept
    loss, grads = found["none"]
    assert loss > 0.1
    for remat in ("dots", "layer"):
        assert found[remat][0] == pytest.approx(float(loss), rel=1e-6)
        for name, grad in named(found[remat][1]).items():
            want = np.asarray(named(grads)[name])
            np.testing.assert_allclose(grad, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def dots(jaxpr) -> list:
    """The operands' dtypes of every product in a program."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append({variable.aval.dtype.name for variable in equation.invars})
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                found += dots(inner)
    return found


TX = make_optimizer(TrainConfig(learning_rate=1e-5, warmup_fraction=0.01), 100)
RECIPE = Recipe(LOSS, num_anchors=3, chunk=16, seed=11, remat="layer", ema=0.15)


def new_state(step: int = 0) -> TrainState:
    _, weights, shape = rows_and_weights("bfloat16")
    drafter = make_drafter(shape, weights)
    params = trainable(drafter)
    average = jax.tree.map(jnp.copy, params)
    return TrainState(jnp.int32(step), drafter, jax.jit(TX.init)(params), average)


def test_bfloat16_computes_on_float32_weights_and_their_average():
    """Steps far below bfloat16's resolution add up; the average is that of a loop in float64."""
    batch, weights, shape = rows_and_weights("bfloat16")
    state, head = new_state(), make_head()
    wanted = {name: array.astype(np.float64) for name, array in weights.items()}
    for step in range(4):
        state, metrics = train_step(state, head, batch, tx=TX, recipe=RECIPE)
        decay = min(0.15, (1 + step) / (10 + step))
        assert metrics["finite"]["loss"]
        for name, array in jax.device_get(named(state.drafter)).items():
            wanted[name] = decay * wanted[name] + (1 - decay) * array
    after, average = jax.device_get((named(state.drafter), named(state.served)))
    for name, array in weights.items():
        moved = np.abs(after[name] - array)
        assert 0 < moved.max() < 1e-4, name
        np.testing.assert_allclose(average[name], wanted[name], rtol=1e-6, atol=1e-7)
        assert (average[name] != after[name]).any()
    same = [(jnp.bfloat16(after[n]) == jnp.bfloat16(x)).mean() for n, x in weights.items()]
    assert np.mean(same) > 0.95  # what bfloat16 weights would have lost
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert len(floats) == 4 * len(weights) and {x.dtype for x in floats} == {np.dtype("float32")}
    program = jax.make_jaxpr(loss_of(batch, shape, "none"))(state.drafter)
    products = dots(program.jaxpr)
    # All but those of the confidence and Markov heads, which are float32, and of attention, which
    # are made float32 on a CPU.
    assert sum(x == {"bfloat16"} for x in products) > 0.6 * len(products) > 10, products


def test_an_average_takes_no_part_in_what_is_skipped_or_not_finite():
    batch, *_ = rows_and_weights("bfloat16")
    nothing = dataclasses.replace(batch, loss_mask=jnp.zeros_like(batch.loss_mask))
    nan = dataclasses.replace(batch, taps=batch.taps * jnp.nan)
    for bad in (nothing, nan):
        state = new_state(step=5)
        moved = jax.tree.map(lambda x: x + 1, state.ema)
        kept = jax.device_get(named(moved))
        state = dataclasses.replace(state, ema=moved)
        state, _ = train_step(state, make_head(), bad, tx=TX, recipe=RECIPE)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(named(state.ema)), kept)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"remat": "some"}, "train.remat='some': must be one of none, layer, dots"),
        ({"ema": 1.0}, "train.ema=1.0: a decay"),
        ({"ema": -0.1}, "train.ema=-0.1: a decay"),
    ],
)
def test_other_values_are_refused_by_name(change, expected):
    fields = {
        "target": "t",
        "data": {"prompts": "p"},
        "drafter": {"target_layer_ids": (0,), "mask_token_id": 1},
        "train": change,
    }
    with pytest.raises(UserError, match=expected):
        from_mapping(RunConfig, fields)


@pytest.mark.parametrize(
    "options",
    [{}, {"vocab_size": 2500}, {"markov_head": "gated"}],
    ids=["whole", "pruned", "gated"],
)
def test_a_step_never_holds_logits_of_all_slots(options):
    """64 anchors of 4 slots, 3,000 tokens: every array of the program that XLA has made of a train
    step, kernels' temporaries included, is smaller than a quarter of [slots, V]."""
    vocab, length, anchors = 3000, 128, 64
    shape = dataclasses.replace(make_shape(**options), vocab_size=vocab)
    tx = make_optimizer(TrainConfig(), 100)

    def state() -> TrainState:
        return state_of(new_drafter(shape, rngs=nnx.Rngs(0)), tx=tx)

    row = make_row((length,), range(4, length), seed=1, length=length)
    batch = make_batch([row], pruned=shape.pruned)
    table = place(np.ones((vocab, HIDDEN), np.float32), "vocab", "embed")
    head = TargetHead(table, table)
    recipe = Recipe(LOSS, anchors, chunk=16, seed=0)
    lowered = train_step.lower(abstract(state), head, batch, tx=tx, recipe=recipe)
    sizes = [
        math.prod(map(int, dims.split(",")))
        for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", lowered.compile().as_text())
    ]
    logits = anchors * shape.config.block_size * shape.draft_vocab
    assert 16 * shape.draft_vocab <= max(sizes) < logits / 4, max(sizes)
