"""The work that is counted for the log."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MixtralConfig

from data.batch import Document
from data.target_head import TargetHead
from data.target_model import target_sizes
from data.teacher import OnlineTeacher
from drafters.dflash import DFlashConfig, DFlashDrafter
from drafters.drafter import Drafter, FrozenTarget
from drafters.dspark import DSparkConfig, DSparkDrafter
from drafters.eagle3 import Eagle3Config, Eagle3Drafter
from tests.documents import MASKS, SHAPE, D, V, make_batch, make_documents
from train.work import matmul_peak


class Products(TorchDispatchMode):
    """Counts the FLOPs of all matrix products but the batched ones, which are attention's own."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            one, other = args[-2:]
            self.flops += 2 * len(one) * one.shape[1] * other.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("words", [20, V])
@pytest.mark.parametrize("method", ["eagle3", "eagle3 fc_norm", "dflash", "dflash kl", "dflash dpace", "dspark"])
def test_drafters_work_is_what_is_multiplied(method: str, words: int) -> None:
    """Forward and backward. Its weights of norms, which are few, are counted in."""
    torch.manual_seed(0)
    target = FrozenTarget(torch.randn(V, D), TargetHead(torch.randn(V, D), None, 1.0, None))
    kept, reduced = torch.arange(words), words if words < V else None
    blocks: dict[str, Any] = {"num_layers": 2, "block_size": 4, "aux_layers": (1, 2, 3), "mask_token_id": 39, "num_anchors": 3}
    drafter: Drafter
    if method.startswith("eagle3"):
        settings = Eagle3Config((1, 2, 3), reduced, num_steps=3, fc_norm="fc_norm" in method)
        drafter = Eagle3Drafter(SHAPE, settings, kept_W=kept, target=target)
    elif method == "dspark":
        config = DSparkConfig(**blocks, draft_vocab_size=reduced, markov_rank=6)
        drafter = DSparkDrafter(SHAPE, config, kept_W=kept, target=target)
    else:
        more: dict[str, Any] = {"": {}, "kl": {"loss": "kl"}, "dpace": {"dpace_alpha": 0.5}}[method[7:]]
        drafter = DFlashDrafter(SHAPE, DFlashConfig(**blocks, draft_vocab_size=reduced, **more), kept_W=kept, target=target)
    batch = make_batch([make_documents(MASKS)[:3], make_documents(MASKS)[3:]], target.head)
    batch = batch._replace(aux_hidden_BTAD=batch.aux_hidden_BTAD.float(), last_hidden_BTD=batch.last_hidden_BTD.float())
    with Products() as counted:
        output = drafter(batch)
        output.loss_sum.backward()
    assert output.work == pytest.approx(counted.flops, rel=0.03)


def test_targets_work_is_what_torch_counts(tiny_target: Path) -> None:
    """Within attention's own products, which are few for 8 tokens."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.get_decoder()(input_ids=torch.ones(2, 8, dtype=torch.int64))
    teacher = OnlineTeacher(model, (2,))
    assert teacher.work_per_token == pytest.approx(counter.get_total_flops() / 16, rel=0.03)
    # Of eight tokens three are the answer, which the head reads.
    teacher.features([Document("a", torch.arange(3, 11), torch.arange(8) > 4)])
    assert teacher.work == 8 * teacher.work_per_token + 2 * 3 * 320 * 96


def test_work_of_a_mixture_of_experts_by_hand() -> None:
    """Of eight experts a token goes through two. A layer: 4 x 16 x 16 of attention, a router of 8 x 16, experts of 3 x 16 x 24."""
    config = MixtralConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=50,
    )
    found, norms = target_sizes(config), 2 * 16
    assert found.layers == [4 * 16 * 16 + 8 * 16 + 8 * 3 * 16 * 24 + norms] * 3
    assert found.outer == 2 * 50 * 16 + 16
    assert found.work_per_token == 3 * 2 * (4 * 16 * 16 + 8 * 16 + 2 * 3 * 16 * 24 + norms)


def test_peak_is_a_machines() -> None:
    """Between a slow laptop's core and a rack's."""
    assert 1e9 < matmul_peak(torch.device("cpu"), torch.float32) < 1e14
