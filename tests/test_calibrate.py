"""calibrate: rounds recorded as they were, files that say what they are of, exports that use them.

pytest tests/test_calibrate.py
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny

from dspark_jax import calibrate, generate
from dspark_jax.calibrate import Request, halves
from dspark_jax.convert import convert
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.data.conversation import Conversation, Message
from dspark_jax.data.opened import open_target
from dspark_jax.decoding import recording
from dspark_jax.decoding.evaluation import Prompt
from dspark_jax.decoding.recording import Answered, Recipe, RoundLog, record
from dspark_jax.generate import Options
from dspark_jax.scheduling import step_costs
from dspark_jax.scheduling.by_name import read_policy
from dspark_jax.scheduling.calibration import Calibration
from dspark_jax.scheduling.step_costs import BatchCosts, StepCosts
from dspark_jax.training.checkpoint import load_arrays, load_drafter, read_record
from dspark_jax.weights.safetensors import TensorFiles

NEW = 12
REQUEST = Request(rounds=60, max_new_tokens=NEW, batch_size=4, costs=False)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run with eight prompts, calibrated on them."""
    folder = tmp_path_factory.mktemp("calibrate")
    target = tiny.make_target(folder / "target")
    config = tiny.make_config(target, tiny.write_prompts(folder / "prompts.jsonl", 8))
    run = tiny.make_run(folder / "run", config)
    calibrate.run(dataclasses.replace(REQUEST, prompts=str(folder / "prompts.jsonl")), run)
    return run


def again(workdir, **changes):
    prompts = str(workdir.parent / "prompts.jsonl")
    return calibrate.run(dataclasses.replace(REQUEST, prompts=prompts, **changes), workdir)[0]


def test_what_calibrate_leaves(workdir):
    made = Calibration.read(workdir / "calibration.json", 3)
    told = made.recorded
    assert (told.fit_prompts, told.heldout_prompts, told.step) == (4, 4, 1)
    assert told.rounds >= 60 and told.temperature == 1.0 and told.jax == jax.__version__
    # All slots of a round are verified, unless a stop id is among its drafts.
    rounds = made.fit_rounds[0] + made.heldout_rounds[0]
    assert rounds == told.rounds and 0 < made.fit_rounds[0] < rounds
    assert (workdir / "reliability.png").stat().st_size > 1000
    (log,) = (workdir / "calibration").iterdir()
    before = log.read_bytes()
    assert again(workdir) == made and log.read_bytes() == before  # nothing is decoded again
    # A kill tears a line; what follows is the same.
    lines = before.splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-1]) + lines[-1][:30])
    resumed = again(workdir)
    assert resumed.recorded == made.recorded
    np.testing.assert_allclose(resumed.temperatures, made.temperatures, rtol=1e-3)
    want, got = (
        sorted(map(json.loads, x.splitlines()), key=str) for x in (before, log.read_bytes())
    )
    for one, other in zip(want, got, strict=True):  # to rounding: its neighbours are other ones
        np.testing.assert_allclose(
            *(np.array(x.pop("logits", 0), float) for x in (one, other)), rtol=1e-4, atol=1e-5
        )
        assert one == other
    assert "chance" in calibrate.summary(made) and "slot 3" in calibrate.summary(made)


def test_a_calibration_that_made_it_worse_says_so(workdir):
    made = Calibration.read(workdir / "calibration.json", 3)
    better = dataclasses.replace(made, before=dataclasses.replace(made.before, ece=(1.0,) * 3))
    worse = dataclasses.replace(made, before=dataclasses.replace(made.before, ece=(0.0,) * 3))
    assert "worse than the head as it was trained" in calibrate.summary(worse)
    assert "worse" not in calibrate.summary(better)


def test_halves_share_no_prompt():
    names = [f"p{i}" for i in range(21)]
    fit, heldout = halves(names)
    assert (
        not fit & heldout and fit | heldout == set(names) and (len(fit), len(heldout)) == (11, 10)
    )
    assert halves(names[::-1]) == (fit, heldout)


def test_the_record_is_what_happened(workdir):
    """Row by row the same in any batch, and it adds up to the text."""
    run = read_record(workdir)
    with jax.set_mesh(make_mesh()):
        target = open_target(run.config.target, "float32")
        drafter = load_drafter(run, workdir, 1)
        ids = target.tokenizer("sun 1?")["input_ids"]
        prompts = [
            (Prompt("a", tuple(ids)), 0),
            (Prompt("a", tuple(ids)), 1),
            (Prompt("b", (5, 6)), 0),
        ]
        how = {"temperature": 1.0, "top_p": 1.0, "max_new": NEW, "seed": 3}

        def rows(batch):
            answers = [
                x for group in record(target, drafter, prompts, **how, batch=batch) for x in group
            ]
            return {(one.prompt, one.sample): one.rounds for _, one in answers}

        together, alone = rows(4), rows(1)
    assert set(together) == {("a", 0), ("a", 1), ("b", 0)} == set(alone)
    for key, rounds in together.items():
        np.testing.assert_array_equal(rounds.accepted, alone[key].accepted)
        np.testing.assert_array_equal(rounds.verified, alone[key].verified)
        np.testing.assert_allclose(rounds.logits, alone[key].logits, atol=1e-4)
        emitted = 1 + np.cumsum(rounds.accepted + 1)
        stopped = emitted[-1] < NEW  # by the stop id
        assert (emitted[:-1] < NEW).all() and (stopped or emitted[-1] >= NEW)
    assert (together["a", 0].logits.shape != together["a", 1].logits.shape) or not np.allclose(
        together["a", 0].logits, together["a", 1].logits
    )


def test_a_stop_id_among_the_drafts_ends_what_counts_as_verified():
    one = recording.RoundRecord(
        running=np.array([[True, False], [True, True]]),
        drafts=np.array([[[5, 9, 6], [1, 1, 1]], [[5, 6, 7], [9, 1, 1]]]),
        confidence=np.arange(12.0).reshape(2, 2, 3),
        verified=np.full((2, 2), 3),
        accepted=np.array([[2, 0], [1, 3]]),
    )
    first, second = recording._by_row([one], np.array([9]), 2, 3)
    np.testing.assert_array_equal(first.verified, [2, 3])
    np.testing.assert_array_equal(first.accepted, [2, 1])
    np.testing.assert_array_equal(first.logits, [[0, 1, 2], [6, 7, 8]])
    np.testing.assert_array_equal(second.verified, [1])
    np.testing.assert_array_equal(second.accepted, [1])
    whole = recording.together([first, None, second])
    np.testing.assert_array_equal(whole.verified, [2, 3, 1])


def test_a_log_gives_back_every_bit_and_refuses_what_is_not_its_own(tmp_path):
    recipe = Recipe(1, "d", "t", 1.0, 1.0, 8, 0)
    log = RoundLog(tmp_path, recipe)
    logits = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    rounds = recording.Rounds(logits, np.array([0, 1, 2, 3]), np.full(4, 3))
    prompt = Prompt("a", (1, 2))
    log.add([prompt, prompt], [Answered("a", 0, rounds), Answered("a", 1, None)])
    log.close()
    log = RoundLog(tmp_path, recipe)
    assert log.has(prompt, 0) and log.has(prompt, 1) and not log.has(prompt, 2)
    np.testing.assert_array_equal(log.done["a", 0][1].logits, logits)
    assert log.done["a", 1][1] is None
    with pytest.raises(UserError, match="another prompt"):
        log.has(Prompt("a", (1, 3)), 0)
    log.close()
    assert dataclasses.replace(recipe, temperature=0.5).name != recipe.name
    with log.path.open("a") as file:
        file.write('{"prompt": "b"}\n')
    with pytest.raises(UserError, match="line 4 is damaged"):
        RoundLog(tmp_path, recipe)


def test_an_export_has_the_temperature_folded_in(workdir, tmp_path, capsys):
    made = Calibration.read(workdir / "calibration.json")
    made = dataclasses.replace(made, single_temperature=1.7, single_offset=-0.4)
    made.write(workdir / "calibration.json")
    trained = load_arrays(workdir, 1)

    def exported(name, **options):
        convert(str(workdir), "speculators", tmp_path / name, **options)
        files = TensorFiles(tmp_path / name)
        return [files.read(f"confidence_head.proj.{part}") for part in ("weight", "bias")]

    for ours, part in zip(exported("folded"), ("weight", "bias"), strict=True):
        wanted = np.asarray(trained[f"confidence.{part}"], np.float64) / 1.7
        wanted = wanted - 0.4 if part == "bias" else wanted
        np.testing.assert_array_equal(ours.reshape(-1), wanted.astype(np.float32).reshape(-1))
    said = "divided by the temperature 1.7, plus -0.4, of calibration.json"
    assert said in capsys.readouterr().out
    assert Calibration.read(tmp_path / "folded" / "calibration.json") == made
    weight, _ = exported("raw", calibrated=False)
    np.testing.assert_array_equal(weight.reshape(-1), np.ravel(trained["confidence.weight"]))
    assert "as trained, not calibrated" in capsys.readouterr().out
    assert not (tmp_path / "raw" / "calibration.json").exists()
    # Of other weights: told, or refused where it was demanded.
    other = dataclasses.replace(made.recorded, drafter_hash="other", step=7)
    dataclasses.replace(made, recorded=other).write(workdir / "calibration.json")
    weight, _ = exported("stale")
    np.testing.assert_array_equal(weight.reshape(-1), np.ravel(trained["confidence.weight"]))
    assert "is of step 7 and other weights" in capsys.readouterr().out
    with pytest.raises(UserError, match="--calibrated: .*calibrate again"):
        exported("demanded", calibrated=True)
    assert not (tmp_path / "demanded").exists()
    made.write(workdir / "calibration.json")


COSTS = StepCosts(
    batches=(
        BatchCosts(1, (1, 2, 4), (1.0, 1.5, 1.2), 0.5, (1,), (0.9,)),
        BatchCosts(8, (2, 8, 32), (1.6, 2.0, 4.0), 1.0, (2, 8), (1.7, 1.5)),
    ),
    device="cpu",
    devices=1,
    target="t",
    dtype="float32",
    proposals=3,
    context=16,
    temperature=0.0,
    repeats=3,
    jax="0",
    dspark_jax="0",
)


def test_costs_are_for_this_device(tmp_path):
    path = tmp_path / "costs.json"
    COSTS.write(path)
    costs = StepCosts.read(path, proposals=3)
    assert costs == COSTS
    np.testing.assert_allclose(costs.rounds(1).seconds, [1.5, 1.85, 1.85])  # never falling
    np.testing.assert_allclose(costs.plain(1).seconds, [0.9])
    np.testing.assert_allclose(costs.plain(8).seconds, [1.6, 1.6])
    for rows, last in ((2, 32), (8, 32), (9, 32), (1, 4)):
        assert costs.rounds(rows).tokens[-1] == last
    dataclasses.replace(COSTS, device="TPU v9").write(path)
    with pytest.raises(UserError, match="costs of 'TPU v9', this is 'cpu'"):
        StepCosts.read(path)
    assert StepCosts.read(path, force=True).device == "TPU v9"
    COSTS.write(path)
    with pytest.raises(UserError, match="rounds with 3 drafts"):
        StepCosts.read(path, proposals=5)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"batches": []}))
    with pytest.raises(UserError, match="no costs"):
        StepCosts.read(path)


@pytest.mark.slow
def test_costs_are_measured(workdir):
    request = dataclasses.replace(REQUEST, record=False, costs=True, batches=(2, 1), repeats=2)
    _, costs = calibrate.run(dataclasses.replace(request, context=16), workdir)
    assert StepCosts.read(workdir / step_costs.FILE, proposals=3) == costs
    assert [(one.rows, one.tokens[0], one.tokens[-1]) for one in costs.batches] == [
        (1, 1, 4),
        (2, 1, 8),
    ]
    assert [one.plain_tokens for one in costs.batches] == [(1,), (1, 2)]
    assert all(0 < seconds < 5 for one in costs.batches for seconds in one.seconds)
    policy = options_policy(workdir, "hardware")
    assert policy.costs.tokens[-1] == 4
    (answer,) = ask(workdir, scheduler="hardware", temperature=0.0)
    assert answer.equal and answer.verified_per_round is not None


def options_policy(workdir, text, **changes):
    fields = {"step": 1, "proposals": 3, "has_confidence": True, "rows": 1} | changes
    return read_policy(text, workdir, **fields)


def ask(workdir, **options):
    conversation = Conversation("p", "test", (Message("user", "sun 1?"),))
    with open("/dev/null", "w") as out:
        return generate.run(workdir, [conversation], Options(max_new_tokens=NEW, **options), out)


def test_schedulers_by_name(workdir, tmp_path):
    assert options_policy(workdir, "all") is None
    fixed = options_policy(workdir, "fixed:2")
    assert (fixed.kind, fixed.length, fixed.temperatures) == ("fixed", 2, None)
    threshold = options_policy(workdir, "threshold:0.6")
    made = Calibration.read(workdir / "calibration.json")
    assert threshold.threshold == 0.6 and threshold.temperatures == made.temperatures
    load = options_policy(workdir, "load:0.2:0.7")
    assert (load.threshold, load.highest) == (0.2, 0.7)
    COSTS.write(tmp_path / "costs.json")
    assert options_policy(tmp_path, "hardware", rows=4).costs.tokens[-1] == 32


@pytest.mark.parametrize(
    "text, changes, said",
    [
        ("fast", {}, "write all, off, fixed:N"),
        ("fixed", {}, "write all"),
        ("fixed:x", {}, "x is no whole number"),
        ("fixed:4", {}, "the drafter proposes 3"),
        ("fixed:0", {}, "write fixed:1 to fixed:3, or off"),
        ("fixed:1.5", {}, "1.5 is no whole number"),
        ("threshold:1.5", {}, "--scheduler=threshold:1.5: confidence is C from 0 to 1"),
        ("threshold:nan", {}, "confidence is C from 0 to 1"),
        ("load:0.7:0.2", {}, "confidence is 0 <= LOW <= HIGH <= 1"),
        ("threshold:0.5", {"has_confidence": False}, "confidence head"),
        ("threshold:0.5", {"step": 2}, "is of step 1, this is step 2"),
        ("hardware", {"proposals": 2}, "no .*costs.json|rounds with 3 drafts"),
    ],
)
def test_schedulers_that_cannot_be(workdir, text, changes, said):
    with pytest.raises(UserError, match=said):
        options_policy(workdir, text, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["fixed:1", "threshold:0.4", "load:0.2:0.5"])
def test_a_scheduler_changes_no_greedy_text(workdir, scheduler):
    (answer,) = ask(workdir, scheduler=scheduler)
    (whole,) = ask(workdir)
    assert answer.tokens == whole.tokens and answer.equal
    assert answer.verified_per_round <= 3 and whole.verified_per_round is None
    if scheduler == "fixed:1":
        assert answer.verified_per_round == 1 and answer.accepted_length <= 2


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"temperature": -1.0}, "--temperature=-1"),
        ({"top_p": 0.0}, "--top_p=0"),
        ({"top_p": float("nan")}, "--top_p=nan"),
        ({"record": False, "costs": False}, "nothing to do"),
        ({"rounds": 0}, "--rounds=0"),
        ({"batches": (0,)}, "--batches"),
        ({"context": 256, "costs": True}, "--context=256: the target has only 256 positions"),
        ({"step": "9"}, "no checkpoint"),
        ({"prompts": ""}, "give --prompts=FILES"),
        ({"max_new_tokens": 300}, "only 256 positions"),
    ],
)
def test_what_cannot_be_calibrated(workdir, changes, said):
    prompts = {"prompts": str(workdir.parent / "prompts.jsonl")}
    with pytest.raises(UserError, match=said):
        calibrate.run(dataclasses.replace(REQUEST, **(prompts | changes)), workdir)
