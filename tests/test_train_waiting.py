"""No training step waits for the device: on the meta device, where tensors have no values, whatever would read one fails."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from data.batch import Document, HostCopy, StepOutput, to_device
from data.teacher import OnlineTeacher
from drafters.dflash import DFlashConfig, DFlashDrafter
from drafters.drafter import Drafter, FrozenTarget
from drafters.dspark import DSparkConfig, DSparkDrafter
from drafters.eagle3 import Eagle3Config, Eagle3Drafter
from drafters.layers import DrafterShape

META = torch.device("meta")
METHODS = ["eagle3", "dflash", "dspark"]


def build(method: str, shape: DrafterShape, target: FrozenTarget) -> Drafter:
    kept_W = torch.arange(0, shape.vocab_size, 2)
    blocks: dict[str, Any] = {"num_layers": 2, "block_size": 4, "aux_layers": (1, 2), "mask_token_id": 5, "num_anchors": 6}
    blocks |= {"draft_vocab_size": len(kept_W)}
    if method == "eagle3":
        return Eagle3Drafter(shape, Eagle3Config((1, 2), len(kept_W), num_steps=3), kept_W=kept_W, target=target)
    if method == "dspark":
        return DSparkDrafter(shape, DSparkConfig(**blocks, sliding_window=6), kept_W=kept_W, target=target)
    return DFlashDrafter(shape, DFlashConfig(**blocks, loss="lk", dpace_alpha=0.5), kept_W=kept_W, target=target)


def step(drafter: Drafter, teacher: OnlineTeacher) -> StepOutput:
    """The target's forward, what is most likely, labels, loss, gradient, clipping: of three documents in two rows, one of them
    greedy."""
    mask_T = torch.arange(14) > 3
    one, other, third = (Document(str(i), torch.arange(3, 17), mask_T, greedy=i == 1) for i in range(3))
    batch = teacher.batch([[one, other], [third]], [7, 8])
    total = to_device(drafter.loss_weight(batch), teacher.model.device).clamp_min(1e-6)
    output = drafter(batch)
    (output.loss_sum / total).backward()
    nn.utils.clip_grad_norm_([parameter for parameter in drafter.parameters() if parameter.requires_grad], 1.0)
    return output


@pytest.mark.parametrize("method", METHODS)
def test_a_step_reads_nothing_back(method: str, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Meta has no autocast, which would read nothing, either.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    with META:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_target)).eval()
    drafter = build(method, DrafterShape.of(model.config), FrozenTarget.of(model)).to(META)
    output = step(drafter, OnlineTeacher(model, (1, 2)))
    assert all(parameter.grad is not None and parameter.grad.is_meta for parameter in drafter.parameters())
    assert all(x.is_meta for x in (output.loss_sum, *(x for pair in output.metrics.values() for x in pair)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU is waited for")
@pytest.mark.parametrize("method", METHODS)
def test_a_step_on_a_gpu_waits_for_nothing(method: str, tiny_target: Path) -> None:
    cuda = torch.device("cuda")
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.bfloat16).to(cuda)
    drafter, teacher = build(method, DrafterShape.of(model.config), FrozenTarget.of(model)).to(cuda), OnlineTeacher(model, (1, 2))
    with torch.autocast("cuda", torch.bfloat16):
        step(drafter, teacher)  # the first tries the kernels
        torch.cuda.set_sync_debug_mode("error")
        try:
            output = step(drafter, teacher)
            loss = HostCopy(output.loss_sum[None])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert loss.read() == output.loss_sum[None].tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="what is pinned is copied to a GPU")
def test_what_is_copied_arrives() -> None:
    """Also a column, and what is one number many times."""
    for x in (torch.arange(6), torch.arange(6).view(3, 2)[:, 1], torch.arange(3).expand(2, 3)):
        assert to_device(x, torch.device("cuda")).tolist() == x.tolist()


def test_a_copy_to_the_host() -> None:
    assert HostCopy(torch.tensor([1.5, 2.0])).read() == [1.5, 2.0]
