"""Losses between a drafter's distribution q and its target's p, and their gradients: fused linear cross-entropy, KL and TV.

A head turns a few hundred numbers into a logit for every word: the logits of a packed row are by far the largest thing in training.
So head_loss() never holds those of more than a chunk of rows, the target's as little as the drafter's: it takes the gradient while
they are there (d loss / d logits is q - p or nearly that), and keeps of it what the layers below need. One teacher row serves all
rows that it judges.

Shapes: R rows, J teacher rows, H width of what a head reads, W vocabulary, D target width.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from data.batch import to_device
from data.target_head import TargetHead, first_argmax, head_logits

Loss = Literal["kl", "ce", "tv", "lk"]


class LossWeights(NamedTuple):
    """A row's loss, ce * CE + kl * KL + tv * TV:

    CE: -log q of the label.
    KL: KL(p || q), the soft-label loss of EAGLE-3 (arXiv 2503.01840) less the teacher's entropy, so that 0 is perfect.
    TV: total variation 1 - sum min(p, q), which is 1 - acceptance under speculative sampling (arXiv 2211.17192).
    adaptive: lam * KL + (1 - lam) * TV instead, with lam = exp(-3 * acceptance), detached: LK (arXiv 2602.23881).
    """

    ce: float = 0.0
    kl: float = 0.0
    tv: float = 0.0
    adaptive: bool = False

    @classmethod
    def of(cls, loss: Loss) -> "LossWeights":
        """Those of the loss of that name."""
        return cls(ce=float(loss == "ce"), kl=float(loss == "kl"), tv=float(loss == "tv"), adaptive=loss == "lk")

    @property
    def needs_kl(self) -> bool:
        """By itself, or as a part of lk."""
        return bool(self.kl) or self.adaptive

    @property
    def needs_teacher(self) -> bool:
        return self.adaptive or self.kl > 0 or self.tv > 0


class RowLosses(NamedTuple):
    """Of each row: loss_R, its parts ce_R and tv_R (0 where tv has no weight), whether the label is the most likely: hit_R, bool.
    grad_RW: d loss / d logits, if wanted."""

    loss_R: Tensor
    ce_R: Tensor
    tv_R: Tensor
    hit_R: Tensor
    grad_RW: Tensor | None


def row_losses(
    logits_RW: Tensor,
    label_R: Tensor,
    weights: LossWeights,
    *,
    p_RW: Tensor | None = None,
    entropy_R: Tensor | None = None,
    room_RW: Tensor | None = None,
    with_gradient: bool = True,
) -> RowLosses:
    """Losses of rows and their gradient, in the logits' dtype; writes over the logits, and the gradient into room_RW, if given.

    label_R: int64, indices into W; p_RW: the teacher's probabilities; entropy_R: theirs, if known.
    """
    best_R = first_argmax(logits_RW)
    hit_R = best_R == label_R
    q_RW = torch.softmax(logits_RW, dim=-1, out=room_RW)
    ce_R = _of(logits_RW, best_R) - _of(logits_RW, label_R) - _of(q_RW, best_R).log()
    kl_R = tv_R = torch.zeros_like(ce_R)
    if weights.needs_kl:
        assert p_RW is not None
        entropy_R = torch.special.entr(p_RW).sum(-1) if entropy_R is None else entropy_R
        kl_R = _cross_entropy(p_RW, logits_RW, q_RW, best_R) - entropy_R
    kl: float | Tensor = weights.kl
    tv: float | Tensor = weights.tv
    if weights.tv or weights.adaptive:
        assert p_RW is not None
        tv_R = 1.0 - torch.minimum(p_RW, q_RW, out=logits_RW).sum(-1)
        if weights.adaptive:
            kl = torch.exp(-3.0 * (1.0 - tv_R))
            tv = 1.0 - kl
    loss_R = weights.ce * ce_R + kl * kl_R + tv * tv_R
    gradient = _gradient(q_RW, p_RW, label_R, ce=weights.ce, kl=kl, tv=tv, room_RW=logits_RW) if with_gradient else None
    return RowLosses(loss_R, ce_R, tv_R, hit_R, gradient)


def _of(x_RW: Tensor, word_R: Tensor) -> Tensor:
    """x of one word in each row."""
    return x_RW.gather(-1, word_R[:, None])[:, 0]


def _cross_entropy(p_RW: Tensor, logits_RW: Tensor, q_RW: Tensor, best_R: Tensor) -> Tensor:
    """-sum p log q of each row, of logits whose softmax is q and whose largest is at best; writes over the logits. Relative to the
    largest, for what all logits have in common would cost digits."""
    most_R = _of(logits_RW, best_R)
    return -_of(q_RW, best_R).log() - logits_RW.sub_(most_R[:, None]).mul_(p_RW).sum(-1)


def _gradient(
    q_RW: Tensor,
    p_RW: Tensor | None,
    label_R: Tensor,
    *,
    ce: float,
    kl: float | Tensor,
    tv: float | Tensor,
    room_RW: Tensor,
) -> Tensor:
    """d loss / d logits, written over q. Of a sum over words of f(q) it is q * (f' - <q, f'>)."""
    kl, tv = (x[:, None] if isinstance(x, Tensor) else x for x in (kl, tv))
    factor: Any = ce + kl
    less: list[tuple[Any, Any]] = [(kl, p_RW)]
    if isinstance(tv, Tensor) or tv:
        assert p_RW is not None
        # f' is -1 where more q would be more acceptance, else 0.
        short_RW = torch.lt(q_RW, p_RW, out=room_RW).mul_(q_RW)
        factor = factor + tv * short_RW.sum(-1, keepdim=True)
        less.append((tv, short_RW))
    grad_RW = q_RW if isinstance(factor, float) and factor == 1.0 else q_RW.mul_(factor)
    for weight, other_RW in less:
        if isinstance(weight, Tensor):
            grad_RW.addcmul_(other_RW, weight, value=-1)
        elif weight:
            grad_RW.sub_(other_RW, alpha=weight)
    if ce:
        grad_RW.scatter_add_(-1, label_R[:, None], grad_RW.new_full((1, 1), -ce).expand(len(label_R), 1))
    return grad_RW


class TeacherRows(NamedTuple):
    """The target's head over the draft vocabulary, its last hidden states states_JD, and which of these judges each row: judge_R,
    int64 into J, ascending, on the host."""

    head: TargetHead
    states_JD: Tensor
    judge_R: Tensor


class HeadLoss(NamedTuple):
    """loss_sum: with gradient, fp32 at least; the others of each row, without (see RowLosses)."""

    loss_sum: Tensor
    loss_R: Tensor
    ce_R: Tensor
    tv_R: Tensor
    hit_R: Tensor


def chunk_rows(num_words: int, device: str) -> int:
    """Rows whose logits exist at a time: 16 MiB of them in fp32 on a CPU, 512 MiB elsewhere; but 256 at least, for a matrix product
    of fewer spends its time reading the head."""
    return max(256, ((16 if device == "cpu" else 512) << 20) // (4 * num_words))


CACHED = 4 << 20
"""Bytes of logits that a CPU's caches still hold when the next pass over them comes."""


def head_loss(
    reads: Sequence[tuple[Tensor, Tensor]],
    weights: LossWeights,
    *,
    weight_R: Tensor,
    label_R: Tensor,
    teacher: TeacherRows | None,
) -> HeadLoss:
    """The weighted sum of row losses of logits, the sum over ``reads`` of x @ head.T: pairs of x [R, H] and head [W, H].

    weight_R: fp32; label_R: int64, indices into W; teacher: where the weights need one. Products in the dtype of autocast, if on,
    else of x; all else in fp32 at least.
    """
    assert teacher is not None or not weights.needs_teacher
    flat = [tensor for pair in reads for tensor in pair]
    with_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in flat)
    teacher = teacher if weights.needs_teacher else None
    return HeadLoss(*_HeadLoss.apply(weights, teacher, weight_R, label_R, with_gradient, *flat))  # type: ignore[no-untyped-call]


class _HeadLoss(Function):
    """head_loss(); its forward takes the gradient, its backward only scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: LossWeights,
        teacher: TeacherRows | None,
        weight_R: Tensor,
        label_R: Tensor,
        with_gradient: bool,
        *reads: Tensor,
    ) -> tuple[Tensor, ...]:
        device = reads[0].device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else reads[0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        found = []
        with torch.autocast(device, enabled=False):
            inputs, heads = [x.to(dtype) for x in reads[::2]], [head.to(dtype) for head in reads[1::2]]
            wanted = [with_gradient and needed for needed in ctx.needs_input_grad[5:]]
            grads = [torch.zeros_like(x, dtype=wide) if want else None for x, want in zip(reads, wanted, strict=True)]
            num_words = len(heads[0])
            size = min(chunk_rows(num_words, device), max(len(label_R), 1))
            # Large tensors made anew for every chunk would cost a CPU more than what is done with them.
            rooms = [torch.empty(size, num_words, dtype=wide, device=reads[0].device) for _ in range(2 if teacher is None else 3)]
            for start in range(0, max(len(label_R), 1), size):
                rows = slice(start, start + size)
                room = [x[: len(label_R[rows])] for x in rooms]
                logits_RW = _logits([x[rows] for x in inputs], heads, room[0])
                p_RW, entropy_R = (None, None) if teacher is None else _teach(teacher, rows, room[-1], weights)
                judged = _losses_of_few(logits_RW, label_R[rows], weights, p_RW, entropy_R, room[1], with_gradient=with_gradient)
                found += [losses[:4] for losses in judged]
                if with_gradient:
                    _add_gradients(grads, room[1].to(dtype), inputs, heads, weight_R[rows, None], rows)
            loss_R, ce_R, tv_R, hit_R = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.grads, ctx.dtypes = grads, [x.dtype for x in reads]
        ctx.mark_non_differentiable(loss_R, ce_R, tv_R, hit_R)
        return (loss_R * weight_R).sum(), loss_R, ce_R, tv_R, hit_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        assert ctx.grads is not None, "a loss has one backward: its gradients are scaled in place"
        grads, ctx.grads = ctx.grads, None
        scaled = [None if x is None else x.mul_(grad).to(dtype) for x, dtype in zip(grads, ctx.dtypes, strict=True)]
        return (None, None, None, None, None, *scaled)


def _logits(inputs: list[Tensor], heads: list[Tensor], room_RW: Tensor) -> Tensor:
    """The sum of x @ head.T, in room_RW; of half precision the sum, too."""
    reads = list(zip(inputs, heads, strict=True))
    return head_logits(reads, room_RW) if inputs[0].dtype == room_RW.dtype else room_RW.copy_(head_logits(reads))


def _teach(teacher: TeacherRows, rows: slice, room_RW: Tensor, weights: LossWeights) -> tuple[Tensor, Tensor | None]:
    """The teacher's probabilities of some rows, in room_RW, and their entropies, where KL asks for them; its softmax is taken once
    for all rows that it judges."""
    judge_R = teacher.judge_R[rows]
    first, stop = (int(judge_R[0]), int(judge_R[-1]) + 1) if len(judge_R) else (0, 0)
    inverse_R = to_device(judge_R - first, room_RW.device)
    logits_JW, entropy_R = teacher.head.logits(teacher.states_JD[first:stop]), None
    p_JW = torch.softmax(logits_JW, dim=-1)
    if weights.needs_kl:
        # What is impossible, with a logit of -inf, adds nothing.
        logits_JW.clamp_min_(torch.finfo(logits_JW.dtype).min)
        entropy_R = _cross_entropy(p_JW, logits_JW, p_JW, first_argmax(logits_JW)).to(room_RW.dtype)[inverse_R]
    if p_JW.dtype == room_RW.dtype:
        torch.index_select(p_JW, 0, inverse_R, out=room_RW)
    else:
        room_RW.copy_(p_JW[inverse_R])
    return room_RW, entropy_R


def _losses_of_few(
    logits_RW: Tensor,
    label_R: Tensor,
    weights: LossWeights,
    p_RW: Tensor | None,
    entropy_R: Tensor | None,
    room_RW: Tensor,
    *,
    with_gradient: bool,
) -> list[RowLosses]:
    """row_losses() of a chunk, the gradient in room_RW; on a CPU of few rows at a time, which stay in its caches for all passes."""
    num_rows, num_words = logits_RW.shape
    size = max(16, CACHED // (4 * num_words)) if logits_RW.device.type == "cpu" else max(num_rows, 1)
    found = []
    for start in range(0, max(num_rows, 1), size):
        few = slice(start, start + size)
        p_of, entropy_of = (None if x is None else x[few] for x in (p_RW, entropy_R))
        of: dict[str, Any] = {"p_RW": p_of, "entropy_R": entropy_of, "room_RW": room_RW[few]}
        found.append(row_losses(logits_RW[few], label_R[few], weights, **of, with_gradient=with_gradient))
    return found


def _add_gradients(
    grads: list[Tensor | None], grad_RW: Tensor, inputs: list[Tensor], heads: list[Tensor], weight_R1: Tensor, rows: slice
) -> None:
    """Adds what a chunk's d loss / d logits says of each input and each head."""
    for i, (x, head) in enumerate(zip(inputs, heads, strict=True)):
        dx, dhead = grads[2 * i : 2 * i + 2]
        if dx is not None:
            dx[rows] = (grad_RW @ head).to(dx.dtype) * weight_R1
        if dhead is not None:
            weighed = (x[rows] * weight_R1).to(grad_RW.dtype)
            if dhead.dtype == grad_RW.dtype:
                dhead.addmm_(grad_RW.T, weighed)
            else:
                dhead.add_(grad_RW.T @ weighed)


def dpace_weights(true_BPK: Tensor, exists_BPK: Tensor, *, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): weights [B, P, K] of a block's positions, by what each adds to the expected acceptance.

    true_BPK: probability the drafter gives the true token, 0 where it can't say it. exists_BPK: bool, position holds a label.
    With q~_i = (1 - alpha) q_i + alpha and P_m the product of q~ up to m, position j weighs the sum of P_m over m >= j.
    """
    reach_BPK = ((1 - alpha) * true_BPK + alpha).cumprod(-1) * exists_BPK
    return reach_BPK.flip(-1).cumsum(-1).flip(-1) * exists_BPK
