"""The Markov ablation: its target, its computed optimum, and a very small run of the whole.

python -m pytest tests/test_ablation.py
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "experiments"))

import collision
import markov_ablation

from dspark_jax.core.sharding import make_mesh

TWO = {"of course": 0.5, "no problem": 0.5}


def test_the_target_has_exactly_the_distribution_of_the_source():
    source = collision.Source.of(collision.PHRASES)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, len(source.words), (3, 40)).astype(np.int32)
    with jax.set_mesh(make_mesh()):
        target = collision.make_target(source)
        output = target(jnp.asarray(tokens), taps=(0,))
        probs = np.asarray(jax.nn.softmax(target.head.logits(output.hidden)))
    np.testing.assert_allclose(probs, source.transition[tokens], atol=2e-5)
    # Taps tell which word it was.
    words = np.asarray(output.taps)[:, :, 0].argmax(-1)
    np.testing.assert_array_equal(words, tokens)


@pytest.mark.parametrize("phrases", [{"a b": 0.5, "c b": 0.5}, {"a b": 0.5, "c d": 0.4}])
def test_sources_that_are_not_markov_or_no_distribution_are_refused(phrases):
    with pytest.raises(ValueError):
        collision.Source.of(phrases)


def test_average_of_rounds_by_hand():
    """Two phrases, three slots, each slot drafting what is likeliest (or, after ".", p itself).

    Words: . of course no problem. From "of" or "no" (A): word, stop, next first word are sure,
    4 tokens, and the bonus is a second word. From a second word (B): stop and first word are sure,
    the second is right half the time: 3.5 tokens, then "." or B. From ".": the first word is sure,
    the second half the time and with it the stop: 3 tokens, then A or B. So B : "." : A = 4 : 2 : 1
    and the average is (4 * 3.5 + 2 * 3 + 1 * 4) / 7.
    """
    source = collision.Source.of(TWO)
    transition = source.transition
    stop, of, course, no, problem = np.eye(len(source.words))[:5]
    first = (of + no) / 2
    policy = np.zeros((len(source.words), 3, len(source.words)))
    policy[0] = first, course, stop
    policy[1], policy[3] = (course, stop, first), (problem, stop, first)
    policy[2] = policy[4] = stop, first, course
    found = collision.long_run(transition, policy)
    assert found.accepted_length == pytest.approx(24 / 7)
    np.testing.assert_allclose(found.survival, [1, 6 / 7, 4 / 7], rtol=1e-5)
    best, _ = collision.best_factorised(transition, 3)
    assert best.accepted_length == pytest.approx(24 / 7, rel=1e-5)


def test_best_factorised_where_the_answer_is_known():
    one = collision.Source.of({"of course": 1.0}).transition
    assert collision.best_factorised(one, 4)[0].accepted_length == pytest.approx(5)
    # With two slots, rounds that start at second words never have to draft one.
    two = collision.Source.of(TWO).transition
    assert collision.best_factorised(two, 2)[0].accepted_length == pytest.approx(3)


def test_no_factorised_drafter_beats_the_best_one():
    source = collision.Source.of({"of course": 0.45, "no problem": 0.35, "you are welcome": 0.2})
    transition = source.transition
    best, policy = collision.best_factorised(transition, 4)
    assert best.accepted_length < 5 - 0.1
    assert collision.long_run(transition, policy).accepted_length == best.accepted_length
    np.testing.assert_allclose(policy[:-1].sum(-1).max(), 1)
    rng = np.random.default_rng(0)
    marginal = collision.marginals(transition, 4)
    assert collision.long_run(transition, marginal).accepted_length < best.accepted_length
    lengths = []
    for _ in range(300):  # near the best, near the marginals, and anywhere
        near = (policy, marginal, np.zeros_like(policy))[rng.integers(3)]
        noise = rng.dirichlet(np.full(len(transition), 0.3), policy.shape[:2])
        share = rng.choice([0.01, 0.1, 0.5])
        lengths.append(
            collision.long_run(transition, (1 - share) * near + share * noise).accepted_length
        )
    assert max(lengths) <= best.accepted_length + 1e-6
    assert max(lengths) > best.accepted_length - 0.2  # the search came near it


@pytest.mark.slow
def test_a_small_run_shows_what_the_markov_head_is_worth(tmp_path):
    options = markov_ablation.Synthetic(steps=600, rows=256, measured_rows=32, measured_tokens=256)
    report = {"synthetic": markov_ablation.run_synthetic(options)}
    figures = report["synthetic"]["drafters"]
    best = report["synthetic"]["computed"]["best_factorised"]["accepted_length"]
    with_head, without = figures["markov"], figures["no_markov"]
    # More than any drafter without the head can reach, and that one reaches no more than it can.
    assert with_head["accepted_length_ci95"][0] > best + 1
    assert without["accepted_length_ci95"][0] <= best
    assert without["accepted_length"] > 2  # it has learnt, too
    assert with_head["accepted_length"] <= options.slots + 1
    path = tmp_path / "ablation.png"
    markov_ablation.draw(report, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    text = markov_ablation.summary(json.loads(json.dumps(report, default=list)))
    assert "best factorised" in text and "DSpark drafts" in text


def test_parts_with_blocks_of_two_lengths_share_a_table(tmp_path):
    """And slots that few rounds decided are in the table, but not in the picture."""

    def figures(length, acceptance, survival):
        interval = [length - 0.1, length + 0.1]
        return {
            "accepted_length": length,
            "accepted_length_ci95": interval,
            "conditional_acceptance": acceptance,
            "survival": survival,
            "rounds": 100,
        }

    long = figures(2.5, [0.9, 0.8, 0.5], [0.9, 0.72, 0.36])
    short = figures(1.25, [0.2, 0.25], [0.2, 0.05])
    both = {"temperature_1": short, "temperature_0": short}
    report = {
        "synthetic": {
            "drafters": {"markov": long, "no_markov": long},
            "computed": {"best_factorised": long},
            "drafts_after_the_stop": {"markov": ["of course ."], "no_markov": ["of problem ."]},
        },
        "smollm2": {"steps": 3, "drafters": {"markov": both, "no_markov": both}},
    }
    rows = [line.split() for line in markov_ablation.summary(report).splitlines()]
    assert ["0.900", "0.800", "0.500"] in [row[-3:] for row in rows]
    assert ["0.200", "0.250"] in [row[-2:] for row in rows]
    assert markov_ablation._seen_often(short) == [0.2, None]
    assert markov_ablation._seen_often(long) == [0.9, 0.8, 0.5]
    path = tmp_path / "ablation.png"
    markov_ablation.draw(report, path)
    assert path.read_bytes().startswith(b"\x89PNG")
