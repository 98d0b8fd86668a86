"""Calibration against values worked by hand, and against drafts whose confidence is known to be wrong."""

import math

import pytest
import torch

from drafters.calibration import area_under_curve, calibration_error, fit_temperature, fit_temperatures


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


def test_temperature_of_an_overconfident_head() -> None:
    """Logit +-2 where 3 of 4 are right: sigmoid(2 / T) = 3/4 at T = 2 / ln 3."""
    logits = torch.tensor([2.0, 2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0])
    accepted = torch.tensor([True, True, True, False, False, False, False, True])
    assert fit_temperature(logits, accepted) == pytest.approx(2 / math.log(3), rel=1e-4)


def test_temperatures_are_of_the_reached() -> None:
    """Each position on its own; a draft that was not reached says nothing; a position nobody reached takes the one before."""
    logits = torch.tensor([[2.0, 2.0, 1.0]] * 4 + [[-2.0, 5.0, 1.0]] * 4)
    accepted = torch.tensor([[True, True, True]] * 3 + [[False, False, False]] + [[False, True, False]] * 3 + [[True, True, True]])
    reached = torch.tensor([[True, True, False]] * 4 + [[True, False, False]] * 4)
    first, second, third = fit_temperatures(logits, accepted, reached)
    assert first == pytest.approx(2 / math.log(3), rel=1e-4)
    assert second == pytest.approx(2 / math.log(3), rel=1e-4)
    assert third == second
