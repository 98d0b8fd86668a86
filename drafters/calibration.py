"""Whether a confidence means what it says: scaling, expected calibration error, ranking.

Shapes: R drafts, each with a confidence logit and whether it was accepted; K positions of a block.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy


class Scaling(NamedTuple):
    """A confidence is sigmoid(logit / temperature + shift), with the head's logit."""

    temperature: float = 1.0
    shift: float = 0.0

    def of(self, logits: Tensor) -> Tensor:
        """The scaled logits."""
        return logits / self.temperature + self.shift


def fit_scaling(logits_R: Tensor, accepted_R: Tensor) -> Scaling:
    """The scaling with the least cross-entropy on what was accepted (bool); Guo et al., arXiv 1706.04599, and Platt's shift.

    The shift is needed since a drafter does better on the answers it was trained on, where its head learned, than on others. A
    standard normal prior of log temperature and shift keeps both finite for few drafts.
    """
    logits, truth = logits_R.double(), accepted_R.double()
    found = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # log temperature, shift
    optimiser = torch.optim.LBFGS([found], max_iter=100, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        scaled = logits * torch.exp(-found[0]) + found[1]
        value = cross_entropy(scaled, truth, reduction="sum") + found.square().sum() / 2
        value.backward()
        return value

    optimiser.step(loss)
    log_temperature, shift = found.tolist()
    return Scaling(math.exp(log_temperature), shift)


def fit_each(logits_RK: Tensor, accepted_RK: Tensor, reached_RK: Tensor) -> list[Scaling]:
    """Sequential scaling: draft k's own, on those that were reached, all before them having been accepted.

    The product of the scaled confidences is then the chance that a whole prefix is accepted.
    """
    reached = [reached_RK[:, k] for k in range(logits_RK.shape[1])]
    return [fit_scaling(logits_RK[here, k], accepted_RK[here, k]) for k, here in enumerate(reached)]


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
