"""Row losses against scalar fp64 loops and values worked by hand."""

import math

import pytest
import torch

from drafters.losses import Loss, dpace_weights, row_loss


def loop(loss: Loss, student: list[float], teacher: list[float]) -> float:
    q = [math.exp(x) / sum(map(math.exp, student)) for x in student]
    p = [math.exp(x) / sum(map(math.exp, teacher)) for x in teacher]
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
    tv = 1 - sum(min(a, b) for a, b in zip(p, q, strict=True))
    lam = math.exp(-3 * (1 - tv))
    ce = -math.log(q[p.index(max(p))])
    return {"kl": kl, "ce": ce, "tv": tv, "lk": lam * kl + (1 - lam) * tv}[loss]


@pytest.mark.parametrize("loss", ["kl", "ce", "tv", "lk"])
def test_equals_loops(loss: Loss) -> None:
    torch.manual_seed(0)
    student, teacher = 3 * torch.randn(7, 11), 3 * torch.randn(7, 11)
    expected = [loop(loss, s.tolist(), t.tolist()) for s, t in zip(student, teacher, strict=True)]
    found = row_loss(loss, student, label_R=teacher.argmax(-1), p_RW=teacher.softmax(-1))
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_by_hand() -> None:
    """p = (3/4, 1/4), q = (1/2, 1/2): KL = 3/4 ln 3/2 + 1/4 ln 1/2, TV = 1/4, CE = ln 2."""
    student, teacher, label = torch.zeros(1, 2), torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([1])
    by_hand = {"kl": 0.75 * math.log(1.5) + 0.25 * math.log(0.5), "tv": 0.25}
    for loss, value in by_hand.items():
        assert float(row_loss(loss, student, label_R=label, p_RW=teacher.softmax(-1))) == pytest.approx(value)  # type: ignore[arg-type]
    assert float(row_loss("ce", student, label_R=label, p_RW=None)) == pytest.approx(math.log(2))


def test_gradient_of_kl_is_q_minus_p() -> None:
    """The textbook gradient of softmax cross-entropy; also with bf16 logits, whose loss is taken in fp32."""
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 5e-3)):
        student = torch.randn(4, 9, dtype=dtype, requires_grad=True)
        teacher = torch.randn(4, 9)
        row_loss("kl", student, label_R=teacher.argmax(-1), p_RW=teacher.softmax(-1)).sum().backward()
        assert student.grad is not None
        expected = student.detach().float().softmax(-1) - teacher.softmax(-1)
        torch.testing.assert_close(student.grad.float(), expected, rtol=0, atol=tolerance)


def test_a_teacher_probability_of_zero_adds_nothing() -> None:
    """And no NaN."""
    teacher = torch.tensor([[0.0, -math.inf, 1.0]])
    student = torch.zeros(1, 3, requires_grad=True)
    for loss in ("kl", "tv", "lk", "ce"):
        value = row_loss(loss, student, label_R=torch.tensor([2]), p_RW=teacher.softmax(-1)).sum()  # type: ignore[arg-type]
        assert torch.isfinite(value)
        value.backward()


def test_dpace_weights_by_hand() -> None:
    """alpha 1/2, q = (1, 0, 1/2): q~ = 1, 1/2, 3/4 and products 1, 1/2, 3/8; with all three labels w = 15/8, 7/8, 3/8, with two
    3/2, 1/2, 0. With alpha 0, a certain drafter of K = 3 weighs 3, 2, 1: how many positions each one opens."""
    true = torch.tensor([[[1.0, 0.0, 0.5], [1.0, 0.0, 0.5]]])
    exists = torch.tensor([[[True, True, True], [True, True, False]]])
    assert dpace_weights(true, exists, alpha=0.5).tolist() == [[[15 / 8, 7 / 8, 3 / 8], [3 / 2, 1 / 2, 0.0]]]
    assert dpace_weights(torch.ones(1, 1, 3), torch.ones(1, 1, 3, dtype=torch.bool), alpha=0.0).tolist() == [[[3.0, 2.0, 1.0]]]
