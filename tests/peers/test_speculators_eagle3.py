"""speculators 0.9 loads our EAGLE-3 exports and unrolls the same chains; we load what it saves."""

from pathlib import Path

import harness
import jax
import numpy as np
import pytest
from eagle3_reference import EAGLE3
from exports import PRUNED, make_case, random_inputs, tiny_config

from dspark_jax.core.sharding import place
from dspark_jax.data.opened import open_target
from dspark_jax.weights.compare import shape_differences
from dspark_jax.weights.importing import read_folder

TOLERANCE = 1e-4  # of logits, float32
PLAIN = {f"drafter.{name}": value for name, value in EAGLE3.items()} | {"drafter.block_size": 4}
KINDS = {
    "public": {},
    "pruned": PRUNED
    | {"drafter.eagle3.norm_before_residual": True, "drafter.eagle3.fc_norm": True},
    "output": {"drafter.eagle3.norm_output": True, "drafter.eagle3.norm_before_fc": True},
    "llama": {"drafter.eagle3.qk_norm": False},
}
NAMES = list(KINDS)


@jax.jit
def _ours(drafter, head, tokens, positions, taps, anchors, seen):
    steps, count = drafter.config.block_size, anchors.shape[1]
    features = drafter.features(taps)
    context = drafter.context(head, features, jax.numpy.roll(tokens, -1, 1), positions)
    given = (anchors[..., None] + np.arange(steps)).reshape(1, -1)
    given = jax.numpy.take_along_axis(tokens, given, 1).reshape(1, count, steps)
    at = jax.numpy.take_along_axis(positions, anchors, 1) - 1
    start = jax.vmap(lambda rows, index: rows[index])(features, anchors - 1)
    hidden = drafter.unroll(head, start, given, at, context, seen)
    return drafter.head(head).logits(hidden.reshape(1, count * steps, -1))


def ours(case, head, given, anchors) -> np.ndarray:
    """Logits [A, G, V_d] of our chains, given the tokens of the sequence."""
    before = np.arange(len(given.tokens)) < anchors[:, None]
    seen = before & (given.documents == given.documents[anchors][:, None])
    arrays = (given.tokens, given.positions, given.taps, np.int32(anchors), seen)
    logits = _ours(case.drafter(), head, *(place(x[None], "batch") for x in arrays))
    return np.asarray(logits).reshape(len(anchors), case.record.config.drafter.block_size, -1)


@pytest.fixture(scope="module")
def cases(quick_compilation, tmp_path_factory):
    """Every export, its inputs, the anchors of which a whole chain fits, and our answer."""
    folder, made = tmp_path_factory.mktemp("exports"), {}
    target = open_target(tiny_config(folder / "tiny", PLAIN).target, "float32")
    for name, changes in KINDS.items():
        case = make_case(folder / name, tiny_config(folder / "tiny", PLAIN | changes))
        given = random_inputs(case)
        steps, ends = case.record.config.drafter.block_size, np.bincount(given.documents).cumsum()
        anchors = np.flatnonzero(
            (given.positions > 0) & (np.arange(len(given.tokens)) + steps <= ends[given.documents])
        )
        made[name] = (case, given, anchors, ours(case, target.model.head, given, anchors))
    return made


@pytest.fixture(scope="module")
def peer(cases, tmp_path_factory):
    """What speculators answers, all cases in one process."""
    arrays = {}
    for name, (_, given, _, _) in cases.items():
        arrays |= {f"{name}/{key}": x for key, x in vars(given).items()}
    directories = {name: str(case.directory) for name, (case, *_) in cases.items()}
    folder = tmp_path_factory.mktemp("speculators")
    return harness.ask("speculators", "speculators_chains", folder, {"cases": directories}, arrays)


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_expected_and_none_is_missing(name, peer):
    found = peer[0][name]
    for problem in ("missing", "unexpected", "mismatched", "absent", "surplus"):
        assert found[problem] == [], problem
    assert found["class"] == "Eagle3DraftModel"


@pytest.mark.parametrize("name", NAMES)
def test_chains_are_the_same(name, cases, peer):
    case, _, anchors, mine = cases[name]
    config = case.record.config.drafter
    assert peer[0][name]["steps"] == config.block_size
    assert peer[0][name]["layers"] == [tap + 1 for tap in config.target_layer_ids]
    theirs = peer[1][f"{name}/logits"][:, anchors].swapaxes(0, 1)
    assert len(anchors) > 15 and mine.shape == theirs.shape and np.ptp(mine) > 1
    assert np.abs(mine - theirs).max() <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_what_it_saves_comes_back(name, cases, peer):
    case = cases[name][0]
    found = read_folder(Path(peer[0][name]["saved"]))
    wrong = shape_differences(case.record.shape, found.shape)
    assert [field for field, *_ in wrong if field != "max_positions"] == []
    for key, array in case.arrays.items():
        assert (found.arrays[key] == array).all(), key
