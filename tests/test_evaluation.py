"""The figures of an evaluation against numbers counted by hand, and the command on a tiny run.

pytest tests/test_evaluation.py
"""

import dataclasses
import functools
import json

import jax
import numpy as np
import optax
import pytest
import tiny
from tiny_drafter import random_weights

from dspark_jax import evaluate
from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.data.opened import open_target
from dspark_jax.decoding.costs import round_costs
from dspark_jax.decoding.evaluation import Decoding, read_sets, run_sets
from dspark_jax.decoding.figures import (
    Outcome,
    Timing,
    agreement,
    macro_length,
    set_result,
    speed,
)
from dspark_jax.decoding.rounds import generate_speculative
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.training.checkpoint import RunRecord, load_drafter, save_drafter, write_record
from dspark_jax.training.step import init_state
from dspark_jax.weights.compare import build_drafter


def scripted(accepts: list[int], slots: int = 3, name: str = "p") -> Outcome:
    """A prompt whose rounds accepted so many drafts each, never cut."""
    reached = [sum(a >= k for a in accepts) for k in range(slots)]
    survived = [sum(a > k for a in accepts) for k in range(slots)]
    tokens = sum(a + 1 for a in accepts)
    return Outcome(name, len(accepts), tokens, np.array(reached), np.array(survived), [], None)


def test_figures_are_ratios_of_sums():
    result = set_result([scripted([0, 3, 1]), scripted([2])])
    # Rounds 1, 4, 2 and 3 tokens long.
    assert result.accepted_length == 10 / 4
    assert result.survival == [3 / 4, 2 / 4, 1 / 4]
    assert result.conditional_acceptance == [3 / 4, 2 / 3, 1 / 2]
    assert (result.rounds, result.tokens, result.prompts) == (4, 10, 2)


def test_a_slot_that_is_never_reached_and_prompts_without_rounds_say_nothing():
    result = set_result([scripted([0, 0])])
    assert result.conditional_acceptance == [0.0, None, None]
    assert result.survival == [0.0, 0.0, 0.0]
    nothing = set_result([scripted([])])
    assert nothing.accepted_length is None and nothing.accepted_length_ci95 is None
    assert nothing.survival == [None] * 3
    assert macro_length([[scripted([])]]) == (None, None)


def test_the_interval_is_over_prompts_seeded_and_as_wide_as_it_should_be():
    alike = [scripted([1, 1])] * 30
    assert set_result(alike).accepted_length_ci95 == (2.0, 2.0)
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, 400)
    varied = [scripted([int(a)] * 2) for a in lengths]
    low, high = set_result(varied).accepted_length_ci95
    assert set_result(varied).accepted_length_ci95 == (low, high)
    assert low < set_result(varied).accepted_length < high
    # Prompts, not rounds, are drawn: every prompt is two equal rounds and counts once.
    assert high - low == pytest.approx(2 * 1.96 * lengths.std() / 20, rel=0.15)


def test_every_set_weighs_the_same_in_the_macro_figure():
    short, long = [scripted([0])], [scripted([3] * 50)]
    length, (low, high) = macro_length([short, long])
    assert length == (1 + 4) / 2 == low == high
    assert set_result(short + long).accepted_length == pytest.approx(201 / 51)


def test_speed_is_total_tokens_over_total_seconds():
    found = speed([Timing(2.0, 20, 1.0, 20), Timing(8.0, 20, 3.0, 20)])
    assert found.tokens_per_second_plain == 4.0
    assert found.tokens_per_second_speculative == 10.0
    assert found.speedup == 2.5  # not the mean of 2 and 8/3
    assert found.speedup_ci95 == (2.0, pytest.approx(8 / 3))
    without = speed([Timing(None, None, 1.0, 20)])
    assert without.speedup is None and without.tokens_per_second_plain is None
    assert without.tokens_per_second_speculative == 20.0


def test_agreement_names_the_first_difference():
    same = dataclasses.replace(scripted([1]), output=[5, 6], plain_output=[5, 6])
    other = dataclasses.replace(same, id="q", output=[5, 9], plain_output=[5, 6])
    longer = dataclasses.replace(same, id="r", output=[5, 6, 7], plain_output=[5, 6])
    assert agreement([scripted([1])]) is None
    assert agreement([same]).first_difference is None
    found = agreement([same, other, longer])
    assert (found.equal, found.compared) == (1, 3)
    difference = {"prompt": "q", "position": 1, "speculative": 9, "plain": 6}
    assert found.first_difference == difference
    assert agreement([longer]).first_difference["plain"] is None


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with a random drafter, its config, and a file of prompts."""
    folder = tmp_path_factory.mktemp("evaluation")
    target = tiny.make_target(folder / "target")
    prompts = tiny.write_prompts(folder / "weather.jsonl", 5)
    config = tiny.make_config(target, prompts)
    workdir = folder / "run"
    with jax.set_mesh(make_mesh(1, 1)):
        opened = open_target(config.target, config.target_dtype)
    record = RunRecord(
        config, opened.fingerprint, str(target), opened.model.config, ("LlamaForCausalLM",)
    )
    write_record(workdir, record)
    with jax.set_mesh(make_mesh(1, 1)):
        weights = random_weights(record.shape)
    save_drafter(workdir, weights, step=3)
    return workdir, record, prompts


def test_the_report_keeps_its_contract(run, tmp_path):
    workdir, record, prompts = run
    two = tmp_path / "two.jsonl"
    rows = [{"turns": ["rain?", "a later turn"]}, {"turns": ["x" * 99]}, {"turns": ["fog?"]}]
    two.write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = evaluate.Request(
        tasks=f"{prompts},{two}", max_new_tokens=6, max_prompt_tokens=80, prompts_per_set=3
    )
    out = tmp_path / "deep" / "report.json"
    returned = evaluate.run(request, workdir, out)
    report = json.loads(out.read_text())
    assert set(report["sets"]) == {"weather", "two"}
    slots = record.config.drafter.num_proposals
    for values in report["sets"].values():
        assert len(values["conditional_acceptance"]) == len(values["survival"]) == slots
        low, high = values["accepted_length_ci95"]
        assert 1 <= low <= values["accepted_length"] <= high <= slots + 1
        assert values["tokens"] / values["rounds"] == values["accepted_length"]
    assert (report["sets"]["weather"]["prompts"], report["sets"]["two"]["prompts"]) == (3, 2)
    assert report["dropped_prompts"] == {"weather": [], "two": ["two-2"]}
    assert report["temperature"] == 0
    plain, fast = report["tokens_per_second_plain"], report["tokens_per_second_speculative"]
    assert report["speedup"] == pytest.approx(fast / plain)
    assert report["greedy_equal"] == report["greedy_compared"] == 5
    assert report["target"] == record.config.target
    assert report["drafter"] == f"{workdir}/checkpoints/3"
    assert len(report["commit"]) == 40
    assert report["peak_memory_bytes"] > 1e6 and report["warm_up_seconds"] > 0
    costs = report["round_costs"]
    parts = [value for name, value in costs.items() if name.endswith("_seconds")]
    assert len(parts) == 7 and min(parts) > 0
    ratio = costs["round_seconds"] / costs["plain_step_seconds"]
    assert report["break_even_accepted_length"] == pytest.approx(ratio)
    assert (out.parent / "acceptance_per_slot.png").read_bytes()[:4] == b"\x89PNG"
    shown = evaluate.summary(returned)
    assert "weather" in shown and "times (95 %" in shown and "too long" in shown

    # The same at temperature 1, without plain decoding: no speed-up is claimed.
    request = dataclasses.replace(request, temperature=1.0, plain=False, costs=False)
    report = evaluate.run(request, workdir, out)
    assert report["tokens_per_second_plain"] is None and report["speedup"] is None
    assert report["greedy_equal"] is None and report["round_costs"] is None
    again = evaluate.run(request, workdir, out)
    others = [
        evaluate.run(dataclasses.replace(request, seed=seed), workdir, out) for seed in range(1, 5)
    ]
    counts = ("rounds", "tokens", "accepted_length", "survival")
    figures = [
        [r["sets"][name][c] for name in ("weather", "two") for c in counts]
        for r in (report, again, *others)
    ]
    assert figures[0] == figures[1]
    assert any(other != figures[0] for other in figures[2:])  # one seed alone may agree by chance


@pytest.mark.slow
def test_the_batch_changes_no_figure_and_widths_compile_once(run, tmp_path):
    workdir, record, _ = run
    path = tmp_path / "mixed.jsonl"
    texts = ["sun?", "y" * 120, "rain?", "fog?", "z" * 110]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    with jax.set_mesh(make_mesh(1, 1)):
        target = open_target(record.config.target, "float32")
        drafter = load_drafter(record, workdir, 3)
        sets = read_sets(target, str(path), split="test", per_set=9, max_prompt_tokens=200, seed=0)
        how = Decoding(temperature=1.0, max_new_tokens=5, plain=False)
        before = generate_speculative._cache_size()
        alone = run_sets(target, drafter, sets, how)
        assert generate_speculative._cache_size() == before + 2  # prompts up to 128 and 256
        together = run_sets(target, drafter, sets, dataclasses.replace(how, batch_size=2))
    assert len(together.timings["mixed"]) == 3  # two of the short ones, the third, two long ones
    one, two = (
        {o.id: (o.output, o.rounds, o.tokens, o.survived.tolist()) for o in m.outcomes["mixed"]}
        for m in (alone, together)
    )
    assert one == two and len(one) == 5


@pytest.mark.slow
def test_a_pruned_vocabulary_has_costs_of_its_own(run):
    """Every part runs on the rows and ids that the drafter has."""
    _, record, _ = run
    options = dataclasses.replace(record.config.drafter, vocab_size=64)
    with jax.set_mesh(make_mesh(1, 1)):
        target = open_target(record.config.target, "float32").model
        shape = DrafterShape.of(options, target.config)
        drafter = build_drafter(shape, random_weights(shape))
        costs = round_costs(target, drafter, context=16, repeats=1, temperature=1.0)
    parts = [value for name, value in vars(costs).items() if name.endswith("_seconds")]
    assert len(parts) == 7 and min(parts) > 0


def test_the_generator_gives_its_sources_as_sets_from_the_heldout_split(run):
    _, record, prompts = run
    with jax.set_mesh(make_mesh(1, 1)):
        target = open_target(record.config.target, "float32")
    options = {"split": "test", "max_prompt_tokens": 10_000, "seed": 0}
    sets = read_sets(target, "generator:12", per_set=2, **options)
    assert len(sets) == 4 and all(len(one.prompts) == 2 for one in sets)
    assert all("heldout" in prompt.id for one in sets for prompt in one.prompts)
    both = read_sets(target, f"generator:4,{prompts}", per_set=5, **options)
    assert len(both) == 5
    named = [prompt.id for one in both for prompt in one.prompts if one.name == "weather"]
    assert sorted(named) == [f"weather-{i}" for i in range(1, 6)]
    with pytest.raises(UserError, match="weather: none of its 5 prompts"):
        read_sets(target, str(prompts), per_set=2, **(options | {"max_prompt_tokens": 3}))


def test_mistakes_are_named(run, tmp_path):
    workdir, _, prompts = run
    out = tmp_path / "report.json"
    other = tiny.make_target(tmp_path / "other", seed=1)
    for request, message in (
        (evaluate.Request(tasks=str(prompts), target=str(other)), "has another weights"),
        (evaluate.Request(tasks=str(prompts), step="77"), "no checkpoint '77'"),
        (evaluate.Request(tasks=str(tmp_path / "none.jsonl")), "none.jsonl"),
        (evaluate.Request(tasks=str(prompts), batch_size=0), "--batch_size=0"),
        (evaluate.Request(tasks=str(prompts), max_new_tokens=300), "only 256 positions"),
        (evaluate.Request(tasks=str(prompts), temperature=-1.0), "temperature"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate.run(request, workdir, out)
    with pytest.raises(UserError, match="no run here"):
        evaluate.run(evaluate.Request(), tmp_path / "nothing", out)
    assert not out.exists()


@pytest.mark.slow
def test_smollm2_greedy_text_is_that_of_plain_decoding(bundled_dir):
    """50 prompts, 128 tokens each, with the drafter that training starts from."""
    config = DrafterConfig(
        target_layer_ids=(1, 8, 15, 22, 27),
        mask_token_id=3,
        num_layers=2,
        markov_rank=64,
        init="target",
        dtype="float32",
    )
    with jax.set_mesh(make_mesh(1, 1)):
        target = open_target("smollm2", "float32")
        shape = DrafterShape.of(config, target.model.config)
        init = jax.jit(functools.partial(init_state, shape=shape, tx=optax.identity()))
        drafter = init(jax.random.key(0), target.model).drafter
        sets = read_sets(
            target, "generator:50", split="test", per_set=50, max_prompt_tokens=256, seed=0
        )
        measured = run_sets(target, drafter, sets, Decoding(max_new_tokens=128))
    outcomes = [outcome for group in measured.outcomes.values() for outcome in group]
    found = agreement(outcomes)
    assert found.equal == found.compared == 50, found.first_difference
    assert sum(len(outcome.output) for outcome in outcomes) > 50 * 64
    assert sum(outcome.survived[0] for outcome in outcomes)  # some drafts are accepted
