"""The simulator against rounds counted by hand and against the engine itself.

pytest tests/test_simulation.py
"""

import numpy as np
import pytest

from dspark_jax.core.errors import UserError
from dspark_jax.scheduling.policy import Policy
from dspark_jax.scheduling.schedulers import CostTable
from dspark_jax.scheduling.simulation import Trace, accepted_drafts, simulate

FLAT = CostTable.make((1, 1000), [1.0, 1.0])  # a round takes a second, whatever is in it
LINEAR = CostTable.make((1, 1000), [1.0, 0.001])


def make_trace(accepted: list[int], confidence: float = 2.0, slots: int = 3) -> Trace:
    number = len(accepted)
    logits = np.full((number, slots), confidence, np.float32)
    return Trace(np.array([number]), logits, np.array(accepted, np.int32))


def test_accepted_drafts_are_those_that_the_answer_goes_on_with():
    answer = [4, 5, 6, 7]
    drafts = np.array([[5, 6, 9], [6, 7, 1], [8, 8, 8], [1, 1, 1]])
    assert accepted_drafts(answer, drafts).tolist() == [2, 2, 0, 0]


def test_rounds_by_hand():
    """An answer of 41 tokens whose drafts are always right: 4 tokens a round where 3 are verified;
    the last round has room for what is left only."""
    trace = make_trace([3] * 41)
    fixed = simulate(trace, Policy("fixed", length=3), 1, FLAT, FLAT, rounds=400)
    assert fixed.accepted_length == pytest.approx(4.0, abs=0.05)
    assert fixed.tokens_per_second == fixed.accepted_length and fixed.drafting == 1
    assert fixed.verified_per_request == pytest.approx(3.0, abs=0.05)
    off = simulate(trace, Policy(), 2, FLAT, FLAT)
    assert (off.accepted_length, off.tokens_per_second) == (1.0, 2.0)
    assert (off.verified_per_request, off.drafting, off.tokens_per_second_per_user) == (0, 0, 1.0)
    wrong = simulate(make_trace([0] * 41), Policy("fixed", length=3), 4, LINEAR, FLAT)
    assert wrong.accepted_length == 1.0
    assert wrong.tokens_per_second == pytest.approx(4 / 16, rel=0.05)
    padded = simulate(trace, Policy("fixed", length=1), 3, LINEAR, FLAT, sizes=(3, 12))
    assert padded.tokens_per_second == pytest.approx(6 / 12, rel=0.05)


def test_the_scheduler_follows_the_costs():
    """Where tokens are free it verifies all, where they cost in proportion none that may fail; it
    switches off where drafting alone is dear."""
    rng = np.random.default_rng(0)
    accepted = np.minimum(rng.geometric(0.4, 500) - 1, 3)
    trace = make_trace(accepted.tolist(), confidence=float(np.log(0.6 / 0.4)))
    free = simulate(trace, Policy("hardware", costs=FLAT), 8, FLAT, FLAT)
    best = simulate(trace, Policy("fixed", length=3), 8, FLAT, FLAT)
    assert free == best
    dear = simulate(trace, Policy("hardware", costs=LINEAR), 8, LINEAR, LINEAR)
    assert dear.verified_per_request == 0 and dear.accepted_length == 1
    slow = CostTable.make((1, 1000), [0.1, 0.1])
    policy = Policy("hardware", costs=slow, plain=FLAT)
    off = simulate(trace, policy, 8, slow, FLAT)
    assert off.drafting == 0
    assert off.tokens_per_second == simulate(trace, Policy(), 8, slow, FLAT).tokens_per_second
    later = simulate(trace, Policy("asynchronous", costs=FLAT), 8, FLAT, FLAT)
    assert later.tokens_per_second == pytest.approx(best.tokens_per_second, rel=0.05)


def test_traces_are_kept_and_checked(tmp_path):
    trace = make_trace([1, 2, 3])
    trace.write(tmp_path / "t.npz")
    read = Trace.read(tmp_path / "t.npz")
    assert read.accepted.tolist() == [1, 2, 3] and read.confidence.dtype == np.float32
    for change in ({"accepted": np.zeros(2)}, {"lengths": np.array([0, 3])}):
        fields = {"lengths": trace.lengths, "confidence": trace.confidence,
                  "accepted": trace.accepted} | change  # fmt: skip
        with pytest.raises(UserError, match="trace:"):
            Trace(**fields)
    (tmp_path / "bad.npz").write_bytes(b"no")
    for name in ("bad.npz", "none.npz"):
        with pytest.raises(UserError, match="no trace"):
            Trace.read(tmp_path / name)
