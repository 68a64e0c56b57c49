"""Where a request ends inside a block: exactly where it would have ended token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding import verify

truncate = jax.jit(verify.truncate)


def ended(rows, stop_ids, max_tokens, emitted=None, counts=None, **more):
    tokens = jnp.asarray(rows, jnp.int32)
    batch, width = tokens.shape
    count = jnp.full(batch, width, jnp.int32) if counts is None else jnp.asarray(counts, jnp.int32)
    emitted = jnp.zeros(batch, jnp.int32) if emitted is None else jnp.asarray(emitted, jnp.int32)
    count, finished, reason = truncate(
        verify.VerifyResult(count - 1, tokens, count),
        stop_ids=jnp.asarray(stop_ids, jnp.int32),
        emitted=emitted,
        max_tokens=jnp.broadcast_to(jnp.asarray(max_tokens, jnp.int32), (batch,)),
        **more,
    )
    np.testing.assert_array_equal(finished, np.asarray(reason) != verify.Reason.RUNNING)
    return np.asarray(count).tolist(), np.asarray(reason).tolist()


def test_stop_id_and_limit():
    eos, other = 2, 9
    run_, stop, length = verify.Reason.RUNNING, verify.Reason.STOP, verify.Reason.LENGTH
    assert ended([[5, eos, 7, 7]], [eos], 100) == ([2], [stop])
    assert ended([[eos, 5, 7, 7]], [eos], 100) == ([1], [stop])
    assert ended([[5, 6, 7, eos]], [eos], 100) == ([4], [stop])  # as the bonus token
    assert ended([[5, other, eos, 7]], [eos, other], 100) == ([2], [stop])
    assert ended([[5, 6, 7, eos]], [eos], 100, counts=[3]) == ([3], [run_])  # filler is no stop
    assert ended([[10, 11, eos, 20, 21, 22]], [eos], 5) == ([3], [stop])
    assert ended([[10, 11, 12, 13, 14, eos]], [eos], 5) == ([5], [length])
    assert ended([[10, 11, 12, 13, eos, 20]], [eos], 5) == ([5], [stop])  # both at once
    assert ended([[5, 6]], [eos], 0) == ([0], [length])
    assert ended([[eos, 6]], [eos], 0) == ([0], [length])
    assert ended([[5, 6]], [eos], 1) == ([1], [length])
    assert ended([[5, 6]], [], 9) == ([2], [run_])
    assert ended([[5, 6], [5, 6]], [[5, -1], [6, 7]], 9) == ([1, 2], [stop, stop])  # by row
    assert ended([[0, 0]], [[-1, -1]], 9) == ([2], [run_])
    assert ended([[5, 6]], [eos], 3, emitted=[5]) == ([0], [length])


def test_finished_rows_stay_as_they_are():
    reason = jnp.array([verify.Reason.STOP, verify.Reason.RUNNING, verify.Reason.LENGTH])
    got = ended([[5, 6]] * 3, [6], 9, reason=reason)
    assert got == ([0, 2, 0], [verify.Reason.STOP, verify.Reason.STOP, verify.Reason.LENGTH])


def test_unsound_logits_end_the_request_before_their_token():
    error, stop, length = verify.Reason.ERROR, verify.Reason.STOP, verify.Reason.LENGTH
    finite = jnp.array([[True, False, True]])
    assert ended([[5, 6, 7]], [2], 9, finite=finite) == ([1], [error])
    assert ended([[5, 6, 7]], [5], 9, finite=finite) == ([1], [stop])
    assert ended([[5, 6, 7]], [2], 1, finite=finite) == ([1], [length])
    assert ended([[5, 6, 7]], [2], 9, finite=~finite) == ([0], [error])
    assert ended([[5, 0, 0]], [2], 9, counts=[1], finite=finite) == ([1], [0])  # row never used
    assert ended([[5, 0, 0]], [2], 0, finite=~finite) == ([0], [length])


@pytest.mark.parametrize("width", range(1, 9))
def test_blocks_end_where_single_tokens_do(width):
    rng = np.random.default_rng(width)
    batch = 300
    rows = rng.integers(0, 12, (batch, width))
    counts = rng.integers(1, width + 1, batch)
    emitted, caps = rng.integers(0, 6, batch), rng.integers(0, 12, batch)
    finite = rng.random((batch, width)) > 0.1
    wanted = []
    for b in range(batch):
        kept, reason = 0, verify.Reason.RUNNING
        while reason == verify.Reason.RUNNING:
            if emitted[b] + kept >= caps[b]:
                reason = verify.Reason.LENGTH
            elif kept == counts[b]:
                break
            elif not finite[b, kept]:
                reason = verify.Reason.ERROR
            else:
                kept += 1
                if rows[b, kept - 1] in (3, 7):
                    reason = verify.Reason.STOP
        wanted.append((kept, int(reason)))
    got = ended(rows, [3, 7], caps, emitted, counts, finite=jnp.asarray(finite))
    assert list(zip(*got, strict=True)) == wanted
    assert len({reason for _, reason in wanted}) == 4
