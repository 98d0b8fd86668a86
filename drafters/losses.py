"""Losses between a drafter's distribution q and its target's p, and their gradients, in chunks of rows.

A head turns a few hundred numbers into a logit for every word: the logits of a packed row are by far the largest thing in training.
So head_loss() never holds those of more than a chunk of rows, the target's as little as the drafter's: it takes the gradient while
they are there (d loss / d logits is q - p or nearly that), and keeps of it what the layers below need. One teacher row serves all
rows that it judges.

Shapes: R rows, J teacher rows, H width of what a head reads, W vocabulary, D target width.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from data.target_head import TargetHead

Loss = Literal["kl", "ce", "tv", "lk"]


class Mix(NamedTuple):
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
    def of(cls, loss: Loss) -> "Mix":
        """The loss of that name."""
        return cls(ce=float(loss == "ce"), kl=float(loss == "kl"), tv=float(loss == "tv"), adaptive=loss == "lk")

    @property
    def needs_teacher(self) -> bool:
        return self.adaptive or self.kl > 0 or self.tv > 0


class RowLosses(NamedTuple):
    """Of each row: loss_R, its parts ce_R and tv_R (0 without a teacher), and whether the label is the most likely: hit_R, bool.
    grad_RW: d loss / d logits."""

    loss_R: Tensor
    ce_R: Tensor
    tv_R: Tensor
    hit_R: Tensor
    grad_RW: Tensor


def row_losses(
    logits_RW: Tensor, label_R: Tensor, mix: Mix, *, p_RW: Tensor | None = None, entropy_R: Tensor | None = None
) -> RowLosses:
    """Losses of rows and their gradient, in the logits' dtype; label_R: int64, indices into W; p_RW: the teacher's probabilities;
    entropy_R: theirs, if known."""
    hit_R = logits_RW.gather(-1, label_R[:, None])[:, 0] >= logits_RW.amax(-1)
    log_q_RW = torch.log_softmax(logits_RW, dim=-1)
    ce_R = -log_q_RW.gather(-1, label_R[:, None])[:, 0]
    kl_R = tv_R = torch.zeros_like(ce_R)
    if mix.needs_teacher and (mix.kl or mix.adaptive):
        assert p_RW is not None
        entropy_R = torch.special.entr(p_RW).sum(-1) if entropy_R is None else entropy_R
        kl_R = -entropy_R - (p_RW * log_q_RW).sum(-1)
    q_RW = log_q_RW.exp_()
    kl: float | Tensor = mix.kl
    tv: float | Tensor = mix.tv
    if mix.tv or mix.adaptive:
        assert p_RW is not None
        tv_R = 1.0 - torch.minimum(p_RW, q_RW).sum(-1)
        if mix.adaptive:
            kl = torch.exp(-3.0 * (1.0 - tv_R))
            tv = 1.0 - kl
    loss_R = mix.ce * ce_R + kl * kl_R + tv * tv_R
    return RowLosses(loss_R, ce_R, tv_R, hit_R, _gradient(q_RW, p_RW, label_R, ce=mix.ce, kl=kl, tv=tv))


def _gradient(q_RW: Tensor, p_RW: Tensor | None, label_R: Tensor, *, ce: float, kl: float | Tensor, tv: float | Tensor) -> Tensor:
    """d loss / d logits; writes over q. Of a sum over words of f(q) it is q * (f' - <q, f'>)."""
    by_row = [x[:, None] if isinstance(x, Tensor) else x for x in (kl, tv)]
    factor: Any = ce + by_row[0]
    if isinstance(tv, Tensor) or tv:
        assert p_RW is not None
        short_RW = (q_RW < p_RW).to(q_RW.dtype)  # where more q would be more acceptance
        inner_R1 = (short_RW * q_RW).sum(-1, keepdim=True)
        factor = factor - by_row[1] * short_RW.sub_(inner_R1)
    grad_RW = q_RW if isinstance(factor, float) and factor == 1.0 else q_RW.mul_(factor)
    if isinstance(kl, Tensor) or kl:
        assert p_RW is not None
        grad_RW = grad_RW.sub_(p_RW if isinstance(kl, float) and kl == 1.0 else p_RW * by_row[0])
    if ce:
        grad_RW.scatter_add_(-1, label_R[:, None], grad_RW.new_full((1, 1), -ce).expand(len(label_R), 1))
    return grad_RW


class Judges(NamedTuple):
    """The teacher: its head over the draft vocabulary, last hidden states states_JD, and the one that judges each row: judge_R,
    int64 into J, ascending."""

    head: TargetHead
    states_JD: Tensor
    judge_R: Tensor


class Judged(NamedTuple):
    """loss_sum: with gradient, fp32 at least; the others of each row, without (see RowLosses)."""

    loss_sum: Tensor
    loss_R: Tensor
    ce_R: Tensor
    tv_R: Tensor
    hit_R: Tensor


def chunk_rows(num_words: int, device: str) -> int:
    """Rows whose logits exist at a time: 16 MiB of them in fp32 on a CPU, as its caches may hold, 512 MiB elsewhere; but 256 at
    least, for a matrix product of fewer spends its time reading the head."""
    return max(256, ((16 if device == "cpu" else 512) << 20) // (4 * num_words))


def head_loss(
    reads: Sequence[tuple[Tensor, Tensor]], mix: Mix, *, weight_R: Tensor, label_R: Tensor, judges: Judges | None
) -> Judged:
    """The weighted sum of row losses of logits, the sum over ``reads`` of x @ head.T: pairs of x [R, H] and head [W, H].

    weight_R: fp32; label_R: int64, indices into W; judges: where the mix needs them. Products in the dtype of autocast, if on, else
    of x; all else in fp32 at least.
    """
    assert judges is not None or not mix.needs_teacher
    flat = [tensor for pair in reads for tensor in pair]
    keep_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in flat)
    return Judged(*_HeadLoss.apply(mix, judges if mix.needs_teacher else None, weight_R, label_R, keep_gradient, *flat))  # type: ignore[no-untyped-call]


class _HeadLoss(Function):
    """head_loss(); its forward takes the gradient, its backward only scales it."""

    @staticmethod
    def forward(
        ctx: Any, mix: Mix, judges: Judges | None, weight_R: Tensor, label_R: Tensor, keep_gradient: bool, *reads: Tensor
    ) -> tuple[Tensor, ...]:
        device = reads[0].device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else reads[0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        with torch.autocast(device, enabled=False):
            inputs, heads = [x.to(dtype) for x in reads[::2]], [head.to(dtype) for head in reads[1::2]]
            wanted = [keep_gradient and needed for needed in ctx.needs_input_grad[5:]]
            grads = [torch.zeros_like(x, dtype=wide) if want else None for x, want in zip(reads, wanted, strict=True)]
            found = []
            for rows, taught in _chunks(judges, len(label_R), num_words=len(heads[0]), device=device):
                logits_RW = inputs[0][rows] @ heads[0].T
                for x, head in zip(inputs[1:], heads[1:], strict=True):
                    logits_RW.addmm_(x[rows], head.T)
                p_RW, entropy_R = (None, None) if taught is None else (x.to(wide) for x in taught)
                judged = row_losses(logits_RW.to(wide), label_R[rows], mix, p_RW=p_RW, entropy_R=entropy_R)
                found.append(judged[:4])
                grad_RW, weight_R1 = judged.grad_RW.to(dtype), weight_R[rows, None]
                for i, (x, head) in enumerate(zip(inputs, heads, strict=True)):
                    dx, dhead = grads[2 * i : 2 * i + 2]
                    if dx is not None:
                        dx[rows] = (grad_RW @ head).to(wide) * weight_R1
                    if dhead is not None:
                        dhead.add_(grad_RW.T @ (x[rows] * weight_R1).to(dtype))
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


def _chunks(
    judges: Judges | None, num_rows: int, *, num_words: int, device: str
) -> Iterator[tuple[slice, tuple[Tensor, Tensor] | None]]:
    """Chunks of rows, and of each its teacher's probabilities and their entropy; one at least, of no row if there is none."""
    rows = chunk_rows(num_words, device)
    if judges is None:
        for start in range(0, max(num_rows, 1), rows):
            yield slice(start, start + rows), None
        return
    head, states_JD, judge_R = judges
    # So many teacher rows at a time that they judge as many rows.
    step = max(1, rows * len(states_JD) // max(num_rows, 1))
    firsts = torch.arange(0, len(states_JD) + 1, step, device=judge_R.device)
    bounds = [*torch.searchsorted(judge_R, firsts).tolist(), num_rows]
    for i, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop or (i == 0 and num_rows == 0):
            log_p_JW = torch.log_softmax(head.logits(states_JD[i * step : (i + 1) * step]), dim=-1)
            p_JW = log_p_JW.exp()
            # What is impossible, with a logarithm of -inf, adds nothing.
            entropy_J = -log_p_JW.clamp_min_(torch.finfo(log_p_JW.dtype).min).mul_(p_JW).sum(-1)
            mine_R = judge_R[start:stop] - i * step
            yield slice(start, stop), (p_JW.index_select(0, mine_R), entropy_J[mine_R])


def dpace_weights(true_BPK: Tensor, exists_BPK: Tensor, *, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): weights [B, P, K] of a block's positions, by what each adds to the expected acceptance.

    true_BPK: probability the drafter gives the true token, 0 where it can't say it. exists_BPK: bool, position holds a label.
    With q~_i = (1 - alpha) q_i + alpha and P_m the product of q~ up to m, position j weighs the sum of P_m over m >= j.
    """
    reach_BPK = ((1 - alpha) * true_BPK + alpha).cumprod(-1) * exists_BPK
    return reach_BPK.flip(-1).cumsum(-1).flip(-1) * exists_BPK
