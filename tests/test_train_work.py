"""The work that is counted for the log."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from data.teacher import OnlineTeacher
from train.work import drafter_work, matmul_peak


def test_work_by_hand() -> None:
    """A layer of 3 x 5, run twice for each token: 6 FLOPs per weight, as the first layer of a network does 4 and any other 6."""
    assert drafter_work(torch.nn.Linear(3, 5, bias=False), 2.0) == 6 * 2 * 15


def test_targets_work_is_what_torch_counts(tiny_target: Path) -> None:
    """Within attention's own products, which are few for 8 tokens."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.get_decoder()(input_ids=torch.ones(2, 8, dtype=torch.int64))
    assert OnlineTeacher(model, (2,)).work_per_token == pytest.approx(counter.get_total_flops() / 16, rel=0.03)


def test_peak_is_a_machines() -> None:
    """Between a slow laptop's core and a rack's."""
    assert 1e9 < matmul_peak(torch.device("cpu"), torch.float32) < 1e14
