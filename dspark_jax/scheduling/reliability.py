"""How true predicted probabilities are: calibration error, area under the ROC curve, bins."""

import numpy as np

BINS = 10  # of equal width over 0..1


def expected_calibration_error(
    predicted: np.ndarray, outcome: np.ndarray, bins: int = BINS
) -> float:
    """Mean over rounds of |mean prediction - share accepted| of the bin that a round falls in.

    Bins are of equal width over 0..1, the lower end belonging to the bin and 1 to the last. The
    error of a finite sample is above that of the predictor: see `error_of_perfect`.

    Args:
        predicted: f[N] probabilities.
        outcome: [N] of 0 and 1, or of true probabilities where these are known.
    """
    gaps = np.bincount(_bin(predicted, bins), weights=predicted - outcome)
    return float(np.abs(gaps).sum() / len(predicted))


def error_of_perfect(predicted: np.ndarray, bins: int = BINS) -> float:
    """About the calibration error that chance alone gives if all predictions f[N] are true.

    A bin's gap is then close to normal, and the mean of its size sqrt(2 / pi) deviations.
    """
    variances = np.bincount(_bin(predicted, bins), weights=predicted * (1 - predicted))
    return float(np.sqrt(2 / np.pi * variances).sum() / len(predicted))


def auc(predicted: np.ndarray, outcome: np.ndarray) -> float | None:
    """Chance that a random 1 of `outcome` has a higher prediction than a random 0; ties count 1/2.

    None if there is nothing to compare.
    """
    positives = int(outcome.sum())
    negatives = len(outcome) - positives
    if not positives or not negatives:
        return None
    _, place, ties = np.unique(predicted, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]  # from 1, equals share their mean
    above = ranks[outcome.astype(bool)].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def reliability(
    predicted: np.ndarray, outcome: np.ndarray, bins: int = BINS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean prediction f[M], share accepted f[M] and size i[M] of each bin that is not empty."""
    _, place, sizes = np.unique(_bin(predicted, bins), return_inverse=True, return_counts=True)
    means = [np.bincount(place, weights=values) / sizes for values in (predicted, outcome)]
    return means[0], means[1], sizes


def _bin(predicted: np.ndarray, bins: int) -> np.ndarray:
    return np.minimum((predicted * bins).astype(np.int64), bins - 1)
