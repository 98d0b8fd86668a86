"""Calibration against values worked by hand, and against drafts whose confidence is known to be wrong."""

import math

import pytest
import torch

from drafters.calibration import Scaling, area_under_curve, calibration_error, fit_each, fit_scaling


def test_calibration_error_by_hand() -> None:
    """Two bins: of 0.2, 0.4 one was accepted, |1/2 - 0.3| = 0.2; of 0.9, 0.9 both, |1 - 0.9| = 0.1; half of the drafts in each."""
    confidence = torch.tensor([0.2, 0.4, 0.9, 0.9])
    accepted = torch.tensor([False, True, True, True])
    assert calibration_error(confidence, accepted, num_bins=2) == pytest.approx(0.15)
    assert calibration_error(torch.tensor([1.0, 0.0]), torch.tensor([True, False])) == 0.0


def test_area_under_curve_by_hand() -> None:
    """Accepted 0.9 and 0.5, rejected 0.5 and 0.1: of four pairs three are in order and one is a tie."""
    confidence = torch.tensor([0.9, 0.5, 0.5, 0.1])
    accepted = torch.tensor([True, True, False, False])
    assert area_under_curve(confidence, accepted) == pytest.approx(3.5 / 4)
    assert area_under_curve(-confidence, accepted) == pytest.approx(0.5 / 4)


def test_scaling_of_an_overconfident_head() -> None:
    """Of many drafts, logit 2 where 3 of 4 are accepted and -2 where 1 of 4 is: 2 / T = ln 3. A head that says -1 and -5 of the
    same: (-1) / T + b = ln 3 and -5 / T + b = -ln 3, so T = 2 / ln 3 and b = 1.5 ln 3."""
    accepted = torch.tensor([True, True, True, False, False, False, False, True]).repeat(20000)
    logits = torch.tensor([2.0, 2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0]).repeat(20000)
    assert fit_scaling(logits, accepted) == pytest.approx((2 / math.log(3), 0.0), abs=1e-3)
    found = fit_scaling(logits - 3, accepted)
    assert found == pytest.approx((2 / math.log(3), 1.5 * math.log(3)), abs=1e-3)
    assert found.of(logits - 3)[0] == pytest.approx(math.log(3), abs=1e-3)


def test_scaling_of_few_drafts_is_finite() -> None:
    """All accepted, whatever the logit: no cross-entropy is the least. And nothing known: the head is taken at its word."""
    found = fit_scaling(torch.tensor([1.0, -1.0]), torch.tensor([True, True]))
    assert 0.1 < found.temperature < 10
    assert 0 < found.shift < 3
    assert fit_scaling(torch.zeros(0), torch.zeros(0, dtype=torch.bool)) == Scaling(1.0, 0.0)


def test_each_scaling_is_of_the_reached() -> None:
    """Each draft on its own; one that was not reached says nothing."""
    logits = torch.tensor([[2.0, 2.0, 1.0]] * 4 + [[-2.0, 5.0, 1.0]] * 4)
    accepted = torch.tensor([[True, True, True]] * 3 + [[False, False, False]] + [[False, True, False]] * 3 + [[True, True, True]])
    reached = torch.tensor([[True, True, False]] * 4 + [[True, False, False]] * 4)
    first, second, third = fit_each(logits, accepted, reached)
    assert first == fit_scaling(logits[:, 0], accepted[:, 0])
    assert second == fit_scaling(torch.full((4,), 2.0), torch.tensor([True, True, True, False]))
    assert third == Scaling(1.0, 0.0)
