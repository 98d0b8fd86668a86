"""Losses against scalar fp64 loops, values worked by hand, and the gradients that autograd takes of them written out."""

import math

import pytest
import torch
from torch import Tensor

from data.target_head import TargetHead
from drafters import losses
from drafters.losses import HeadLoss, Loss, LossWeights, TeacherRows, dpace_weights, head_loss, row_losses
from tests.sizes import Sizes

LOSSES: list[Loss] = ["kl", "ce", "tv", "lk"]
DSPARK = LossWeights(ce=0.1, tv=1.8)


def loop(loss: Loss, student: list[float], teacher: list[float]) -> float:
    q = [math.exp(x) / sum(map(math.exp, student)) for x in student]
    p = [math.exp(x) / sum(map(math.exp, teacher)) for x in teacher]
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
    tv = 1 - sum(min(a, b) for a, b in zip(p, q, strict=True))
    lam = math.exp(-3 * (1 - tv))
    ce = -math.log(q[p.index(max(p))])
    return {"kl": kl, "ce": ce, "tv": tv, "lk": lam * kl + (1 - lam) * tv}[loss]


def written_out(logits: Tensor, label: Tensor, p: Tensor, weights: LossWeights) -> Tensor:
    """Row losses in plain torch, for autograd."""
    log_q = logits.log_softmax(-1)
    ce = -log_q.gather(-1, label[:, None])[:, 0]
    kl = torch.nn.functional.kl_div(log_q, p, reduction="none").sum(-1)
    tv = 1 - torch.minimum(p, log_q.exp()).sum(-1)
    if weights.adaptive:
        lam = torch.exp(-3 * (1 - tv.detach()))
        return lam * kl + (1 - lam) * tv
    return weights.ce * ce + weights.kl * kl + weights.tv * tv


@pytest.mark.parametrize("loss", LOSSES)
def test_equals_loops(loss: Loss) -> None:
    torch.manual_seed(0)
    student, teacher = 3 * torch.randn(7, 11), 3 * torch.randn(7, 11)
    expected = [loop(loss, s.tolist(), t.tolist()) for s, t in zip(student, teacher, strict=True)]
    found = row_losses(student.clone(), teacher.argmax(-1), LossWeights.of(loss), p_RW=teacher.softmax(-1))
    torch.testing.assert_close(found.loss_R, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert torch.equal(found.hit_R, student.argmax(-1) == teacher.argmax(-1))


def test_by_hand() -> None:
    """p = (3/4, 1/4), q = (1/2, 1/2): KL = 3/4 ln 3/2 + 1/4 ln 1/2, TV = 1/4, CE = ln 2; their gradients by the logits are
    q - p = (-1/4, 1/4), -q (m - <m, q>) with m = (1, 0), that is (-1/4, 1/4), and q - (0, 1) = (1/2, -1/2)."""
    p, label = torch.tensor([[0.75, 0.25]]), torch.tensor([1])
    by_hand: list[tuple[Loss, float, list[float]]] = [
        ("kl", 0.75 * math.log(1.5) + 0.25 * math.log(0.5), [-0.25, 0.25]),
        ("tv", 0.25, [-0.25, 0.25]),
        ("ce", math.log(2), [0.5, -0.5]),
    ]
    for loss, value, gradient in by_hand:
        found = row_losses(torch.zeros(1, 2), label, LossWeights.of(loss), p_RW=p)
        assert float(found.loss_R) == pytest.approx(value), loss
        torch.testing.assert_close(found.grad_RW, torch.tensor([gradient]))


@pytest.mark.parametrize("weights", [*map(LossWeights.of, LOSSES), DSPARK], ids=[*LOSSES, "dspark"])
def test_gradient_is_autograds(weights: LossWeights) -> None:
    torch.manual_seed(0)
    logits, teacher = (3 * torch.randn(2, 9, 13, dtype=torch.float64)).unbind()
    logits.requires_grad_()
    label, p = teacher.argmax(-1), teacher.softmax(-1)
    expected = written_out(logits, label, p, weights)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    found = row_losses(logits.detach().clone(), label, weights, p_RW=p)
    torch.testing.assert_close(found.loss_R, expected)
    torch.testing.assert_close(found.grad_RW, gradient)


def test_a_teacher_probability_of_zero_adds_nothing() -> None:
    """And no NaN."""
    p = torch.tensor([[0.0, -math.inf, 1.0]]).softmax(-1)
    for loss in LOSSES:
        found = row_losses(torch.zeros(1, 3), torch.tensor([2]), LossWeights.of(loss), p_RW=p)
        assert torch.isfinite(found.loss_R).all()
        assert torch.isfinite(found.grad_RW).all()


class Case:
    """Rows with two reads, their heads, and fewer teachers than rows: all random."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        rows, words, teachers = 50, 23, 12
        shapes = [(rows, 6), (words, 6), (rows, 3), (words, 3)]
        self.flat = [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]
        self.reads = list(zip(self.flat[::2], self.flat[1::2], strict=True))
        self.label, self.weight = torch.randint(words, (rows,)), torch.rand(rows, dtype=dtype)
        judge = torch.randint(teachers, (rows,)).sort().values
        head = TargetHead(torch.randn(words, 5, dtype=dtype), torch.randn(words, dtype=dtype), 0.5, 3.0)
        self.teacher = TeacherRows(head, torch.randn(teachers, 5, dtype=dtype), judge)

    def found(self, weights: LossWeights) -> HeadLoss:
        return head_loss(self.reads, weights, weight_R=self.weight, label_R=self.label, teacher=self.teacher)

    def expected(self, weights: LossWeights) -> Tensor:
        logits = sum((x @ head.T for x, head in self.reads), torch.zeros(()))
        p = self.teacher.head.logits(self.teacher.states_JD).softmax(-1)[self.teacher.judge_R]
        return (self.weight * written_out(logits, self.label, p, weights)).sum()


@pytest.mark.parametrize("rows", [3, 7, 1000], ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("weights", [*map(LossWeights.of, LOSSES), DSPARK], ids=[*LOSSES, "dspark"])
def test_head_loss_and_gradients_are_autograds(weights: LossWeights, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks or whole, of which passes take 16 rows: the sum, and the gradients of what the heads read and of the heads, behind
    a loss that goes on."""
    monkeypatch.setattr(losses, "chunk_rows", lambda *_: rows)
    monkeypatch.setattr(losses, "CACHED", 0)
    case = Case()
    judged, expected = case.found(weights), case.expected(weights)
    torch.testing.assert_close(judged.loss_sum, expected)
    found, wanted = (torch.autograd.grad(3 * x.square(), case.flat) for x in (judged.loss_sum, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weights", [*map(LossWeights.of, LOSSES), DSPARK], ids=[*LOSSES, "dspark"])
def test_a_word_that_a_head_rules_out_adds_nothing(weights: LossWeights) -> None:
    """A bias of -inf, and no soft cap: a logit of -inf, a probability of 0."""
    case = Case()
    bias = torch.randn(23, dtype=torch.float64)
    bias[4] = -math.inf
    case.teacher = case.teacher._replace(head=case.teacher.head._replace(bias_V=bias, soft_cap=None))
    judged, expected = case.found(weights), case.expected(weights)
    assert torch.isfinite(expected)
    torch.testing.assert_close(judged.loss_sum, expected)


def test_a_frozen_head_gets_no_gradient() -> None:
    case = Case()
    for head in case.flat[1::2]:
        head.requires_grad_(False)
    case.found(LossWeights(kl=1.0)).loss_sum.backward()
    assert [x.grad is None for x in case.flat] == [False, True, False, True]


def test_no_rows_no_loss() -> None:
    """A batch without a label: a loss of 0, and gradients of zeros."""
    case = Case()
    teacher = case.teacher._replace(states_JD=case.teacher.states_JD[:0], judge_R=case.teacher.judge_R[:0])
    reads = [(x[:0], head) for x, head in case.reads]
    judged = head_loss(reads, DSPARK, weight_R=case.weight[:0], label_R=case.label[:0], teacher=teacher)
    judged.loss_sum.backward()
    assert float(judged.loss_sum.detach()) == 0.0
    assert all(x.grad is not None and not x.grad.any() for x in case.flat)


def test_under_autocast_products_are_bf16_and_the_loss_is_not() -> None:
    """As far away as 8 bits of mantissa leave it, of logits of about 3; in fp32, as are the gradients."""
    case = Case(torch.float32)
    expected = torch.autograd.grad(case.expected(LossWeights(kl=1.0)), case.flat)
    with torch.autocast("cpu", torch.bfloat16):
        judged = case.found(LossWeights(kl=1.0))
    found = torch.autograd.grad(judged.loss_sum, case.flat)
    assert judged.loss_sum.dtype == torch.float32
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert 1e-4 < float((one - other).norm() / other.norm()) < 0.02


def test_memory_does_not_grow_with_rows() -> None:
    """Of 3000 rows and 900 teacher rows over 10,000 words, in chunks of 419: logits of no more, and the gradients of the heads."""
    rows, teachers, words = 3000, 900, 10_000
    x, head = torch.randn(rows, 4, requires_grad=True), torch.randn(words, 4, requires_grad=True)
    judge_R = (torch.arange(rows) * teachers) // rows
    teacher = TeacherRows(TargetHead(torch.randn(words, 4), None, 1.0, None), torch.randn(teachers, 4), judge_R)
    label_R, weight_R = torch.randint(words, (rows,)), torch.ones(rows)
    with Sizes() as sizes:
        head_loss([(x, head)], LossWeights(kl=1.0), weight_R=weight_R, label_R=label_R, teacher=teacher).loss_sum.backward()
    assert max(sizes.found) == (16 << 20) // (4 * words) * words


def test_what_all_logits_have_in_common_costs_no_digits() -> None:
    """Logits about 200: their log-sum-exp alone would be known to 1e-5."""
    torch.manual_seed(0)
    read, head = torch.randn(40, 8), torch.randn(5000, 8)
    shift = torch.cat((torch.full((40, 1), 200.0), read), 1), torch.cat((torch.ones(5000, 1), head), 1)
    teacher = TargetHead(torch.cat((torch.ones(5000, 1), torch.randn(5000, 8)), 1), None, 1.0, None)
    states, label = torch.cat((torch.full((40, 1), 200.0), torch.randn(40, 8)), 1), torch.randint(5000, (40,))

    def found(dtype: torch.dtype) -> HeadLoss:
        judges = TeacherRows(teacher._replace(weight_VD=teacher.weight_VD.to(dtype)), states.to(dtype), torch.arange(40))
        reads = [(shift[0].to(dtype), shift[1].to(dtype))]
        return head_loss(reads, LossWeights(kl=1.0), weight_R=torch.ones(40, dtype=dtype), label_R=label, teacher=judges)

    torch.testing.assert_close(found(torch.float32).loss_R.double(), found(torch.float64).loss_R, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_of_equal_logits_the_first_is_the_most_likely(bf16: bool) -> None:
    """As argmax has it, and a server: only one label can be drafted. In bf16 there are many equals."""
    read, head = torch.ones(4, 1), torch.tensor([[1.0], [2.0], [2.0], [0.5]])
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        judged = head_loss([(read, head)], LossWeights(ce=1.0), weight_R=torch.ones(4), label_R=torch.arange(4), teacher=None)
    assert judged.hit_R.tolist() == [False, True, False, False]


def test_dpace_weights_by_hand() -> None:
    """alpha 1/2, q = (1, 0, 1/2): q~ = 1, 1/2, 3/4 and products 1, 1/2, 3/8; with all three labels w = 15/8, 7/8, 3/8, with two
    3/2, 1/2, 0. With alpha 0, a certain drafter of K = 3 weighs 3, 2, 1: how many positions each one opens."""
    true = torch.tensor([[[1.0, 0.0, 0.5], [1.0, 0.0, 0.5]]])
    exists = torch.tensor([[[True, True, True], [True, True, False]]])
    assert dpace_weights(true, exists, alpha=0.5).tolist() == [[[15 / 8, 7 / 8, 3 / 8], [3 / 2, 1 / 2, 0.0]]]
    assert dpace_weights(torch.ones(1, 1, 3), torch.ones(1, 1, 3, dtype=torch.bool), alpha=0.0).tolist() == [[[3.0, 2.0, 1.0]]]
