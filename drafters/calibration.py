"""Whether a confidence means what it says: temperature scaling, expected calibration error, ranking.

Shapes: R drafts, each with a confidence logit and whether it was accepted; K positions of a block.
"""

import torch
from torch import Tensor


def fit_temperature(logits_R: Tensor, accepted_R: Tensor) -> float:
    """T for which sigmoid(logits / T) has the least cross-entropy on what was accepted (bool); Guo et al., arXiv 1706.04599.

    The cross-entropy is convex in 1 / T: found by thirds, between 1/50 and 50.
    """
    logits, truth = logits_R.double(), accepted_R.double()
    low, high = 1 / 50, 50.0
    for _ in range(100):
        thirds = (low + (high - low) / 3, high - (high - low) / 3)
        left, right = (float(torch.nn.functional.binary_cross_entropy_with_logits(logits * t, truth)) for t in thirds)
        low, high = (low, thirds[1]) if left < right else (thirds[0], high)
    return 2 / (low + high)


def fit_temperatures(logits_RK: Tensor, accepted_RK: Tensor, reached_RK: Tensor) -> list[float]:
    """Sequential temperature scaling: position k's own T, on the drafts that were reached, all before them having been accepted.

    The product of the scaled confidences is then the chance that a whole prefix is accepted. Where nothing was reached, the T of
    the position before, at first 1.
    """
    found: list[float] = []
    for k in range(logits_RK.shape[1]):
        here = reached_RK[:, k]
        before = found[-1] if found else 1.0
        found.append(fit_temperature(logits_RK[here, k], accepted_RK[here, k]) if here.any() else before)
    return found


def calibration_error(confidence_R: Tensor, accepted_R: Tensor, *, num_bins: int = 15) -> float:
    """Expected calibration error: mean |accepted share - mean confidence| over bins of equal width, weighed by their drafts."""
    bin_R = (confidence_R * num_bins).long().clamp(0, num_bins - 1)
    gap = torch.zeros(num_bins, dtype=torch.float64)
    gap.index_add_(0, bin_R, accepted_R.double() - confidence_R.double())
    return float(gap.abs().sum() / max(len(confidence_R), 1))


def area_under_curve(confidence_R: Tensor, accepted_R: Tensor) -> float:
    """Chance that an accepted draft has the higher confidence of two, an accepted and a rejected one; ties count half."""
    _, group_R, counts = confidence_R.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    rank_R = (ends - (counts.double() - 1) / 2)[group_R]
    good = accepted_R.sum().double()
    bad = len(accepted_R) - good
    return float((rank_R[accepted_R].sum() - good * (good + 1) / 2) / (good * bad))
