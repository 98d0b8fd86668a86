"""The drafters' attention and loss as one would write them down: all scores in one matrix, all logits kept, gradients by autograd.

What eval/bench.py compares with. Same arguments, same values.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.attention import Stretch
from drafters.losses import HeadLoss, LossWeights, TeacherRows


def attend(
    query_MSNC: Tensor,
    keys_values: tuple[Tensor, Tensor],
    stretches: list[Stretch],
    *,
    own: Sequence[tuple[Tensor, Tensor]] = (),
    mask_MSJ: Tensor | None = None,
) -> Tensor:
    """drafters.attention.attend() with a mask [M, B * T] of all keys."""
    M, _, N, C = query_MSNC.shape
    key, value = (x.flatten(0, 1) for x in keys_values)
    T, G = keys_values[0].shape[1], key.shape[1]
    seen_MT = torch.zeros(M, len(key), dtype=torch.bool)
    for row, first, stop, low, high, causal in stretches:
        block = torch.ones(stop - first, high - low, dtype=torch.bool)
        seen_MT[first:stop, row * T + low : row * T + high] = block.tril() if causal else block
    query = query_MSNC.transpose(1, 2) / math.sqrt(C)
    scores = torch.einsum("mnsc,tnc->mnst", query, key.repeat_interleave(N // G, dim=1))
    scores = scores.masked_fill(~seen_MT[:, None, None], -torch.inf)
    if own:
        own_key, own_value = (torch.cat(x, dim=1).repeat_interleave(N // G, dim=2) for x in zip(*own, strict=True))
        own_scores = torch.einsum("mnsc,mjnc->mnsj", query, own_key)
        if mask_MSJ is not None:
            own_scores = own_scores.masked_fill(~mask_MSJ[:, None], -torch.inf)
        scores = torch.cat((scores, own_scores), dim=-1)
    weights = scores.softmax(-1)
    attended = torch.einsum("mnst,tnc->msnc", weights[..., : len(key)], value.repeat_interleave(N // G, dim=1))
    if own:
        attended = attended + torch.einsum("mnsj,mjnc->msnc", weights[..., len(key) :], own_value)
    return attended


def head_loss(
    reads: Sequence[tuple[Tensor, Tensor]], weights: LossWeights, *, weight_R: Tensor, label_R: Tensor, teacher: TeacherRows | None
) -> HeadLoss:
    """drafters.losses.head_loss() with all logits at once."""
    first, *others = (x @ head.T for x, head in reads)
    logits_RW = sum(others, first)
    log_q_RW = logits_RW.log_softmax(-1)
    ce_R = -log_q_RW.gather(-1, label_R[:, None])[:, 0]
    tv_R, terms = torch.zeros_like(ce_R), [weights.ce * ce_R] if weights.ce else []
    share: float | Tensor = weights.kl
    if teacher is not None:
        with torch.no_grad():
            p_RW = teacher.head.logits(teacher.states_JD).softmax(-1)[teacher.judge_R]
        if weights.tv or weights.adaptive:
            tv_R = 1 - torch.minimum(p_RW, log_q_RW.exp()).sum(-1)
            share = torch.exp(-3 * (1 - tv_R.detach())) if weights.adaptive else weights.kl
            terms.append((1 - share if weights.adaptive else weights.tv) * tv_R)
        if weights.kl or weights.adaptive:
            terms.append(share * torch.nn.functional.kl_div(log_q_RW, p_RW, reduction="none").sum(-1))
    loss_R = torch.stack(terms).sum(0)
    hit_R = logits_RW.argmax(-1) == label_R
    return HeadLoss((weight_R * loss_R).sum(), loss_R.detach(), ce_R.detach(), tv_R.detach(), hit_R)
