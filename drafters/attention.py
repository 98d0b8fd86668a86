"""Attention over a row's shared keys and over a few keys of one's own, exact, without scores or masks of all by all.

The softmax over several sets of keys is the sum of the softmaxes over each, weighted exp(lse of the set - lse of all), lse the
log-sum-exp of scores. The gradient through a set needs no more of the others than the output and lse of all (Ring Attention, arXiv
2310.01889). So the shared keys, in stretches that every query of a stretch sees whole or causally, go through the flash kernel
(drafters/flash.py), and the few others are written out: what a slot drafted before (EAGLE-3), a block and the context just before
its anchor (DFlash, DSpark).

Shapes: B rows, T tokens, M slots or blocks of the whole batch, S queries of each (of a slot one), J keys of its own, E keys at the
edge of a block's context, N query heads, G key-value heads (N a multiple of G), R = N / G, C head size.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drafters.flash import flash, flash_backward
from drafters.slots import Places


class Stretch(NamedTuple):
    """Slots or blocks first .. stop-1 see the keys key_first .. key_stop-1 of their row: all, or causally, one key a slot."""

    row: int
    first: int
    stop: int
    key_first: int
    key_stop: int
    causal: bool


def slot_stretches(documents_BT: Tensor, places: Places) -> list[Stretch]:
    """What slots see of their row's keys: those of their document that are not later. Slots side by side share a stretch of all
    that is before them, and one of their own places."""
    found = []
    for run in _runs(documents_BT, places, span=1):
        if run.start < run.low:
            found.append(Stretch(run.row, run.first, run.stop, run.start, run.low, causal=False))
        found.append(Stretch(run.row, run.first, run.stop, run.low, run.high + 1, causal=True))
    return found


class Context(NamedTuple):
    """What blocks see of their row's keys: long stretches, and at the edges of these, for each block, edge_ME (int64, places in
    all rows one after the other), where mask_MSE allows it."""

    stretches: list[Stretch]
    edge_ME: Tensor
    mask_MSE: Tensor


EDGE = 64
"""Blocks whose anchors lie in the same so many tokens of a document share a stretch, which ends at the first one's."""


def block_context(documents_BT: Tensor, anchors: Places, *, num_queries: int, window: int | None) -> Context:
    """What blocks behind anchors see of the context: their document before the anchor, which the target has not read yet when a
    server drafts; under a window only what is less than that many positions away. On the host."""
    T, S = documents_BT.shape[1], num_queries
    stretches, lows, highs, width = [], [], [], 0
    for run in _runs(documents_BT, anchors, span=EDGE):
        low, width = run.start, max(width, run.high - run.low)
        if window is not None:  # seen by the last query of the last block, too
            low = min(max(low, run.high + S - window), run.low)
        if low < run.low:
            stretches.append(Stretch(run.row, run.first, run.stop, low, run.low, causal=False))
        lows += [low] * (run.stop - run.first)
        highs += [run.low] * (run.stop - run.first)
    low_M, high_M = (torch.tensor(x, dtype=torch.int64)[:, None] for x in (lows, highs))
    index_M = anchors.index_M[:, None]
    # Behind the stretch, and under a window before it.
    edge_ME = high_M + torch.arange(width)
    valid_ME = edge_ME < index_M
    if window is not None:
        before_ME = low_M - 1 - torch.arange(min(window, width + S))
        documents = documents_BT[anchors.row_M]
        same_ME = documents.gather(1, before_ME.clamp_min(0)) == documents.gather(1, index_M)
        edge_ME = torch.cat((before_ME, edge_ME), dim=1)
        valid_ME = torch.cat((same_ME & (before_ME >= 0), valid_ME), dim=1)
    mask_MSE = valid_ME[:, None].expand(-1, S, -1)
    if window is not None:
        at_MS = index_M + torch.arange(S)
        mask_MSE = mask_MSE & (at_MS[:, :, None] - edge_ME[:, None] < window)
    flat_ME = anchors.row_M[:, None] * T + edge_ME.clamp(0, T - 1)
    return Context(stretches, flat_ME, mask_MSE)


def own_mask(num_queries: int, *, causal: bool, window: int | None) -> Tensor:
    """What the queries of a block see of one another, bool [S, S]: causal: those before, and themselves; window: those less than
    that many positions away, on either side."""
    offset_S = torch.arange(num_queries)
    distance_SS = offset_S[:, None] - offset_S
    mask_SS = distance_SS >= 0 if causal else torch.ones_like(distance_SS, dtype=torch.bool)
    return mask_SS if window is None else mask_SS & (distance_SS.abs() < window)


class _Run(NamedTuple):
    """Places first .. stop-1, at low .. high of their row, in the document that begins at ``start``."""

    row: int
    first: int
    stop: int
    start: int
    low: int
    high: int


def _runs(documents_BT: Tensor, places: Places, *, span: int) -> list[_Run]:
    """Places that can share a stretch: neighbours in one document (span 1), or all in the same ``span`` tokens of it."""
    row_M, index_M = places
    T = documents_BT.shape[1]
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    at_T = torch.arange(T)
    start_M = torch.where(begins_BT, at_T, 0).cummax(1).values[row_M, index_M]
    inside_M = index_M - start_M
    # Neighbours differ by as much as their numbers do.
    group_M = inside_M - torch.arange(len(index_M)) if span == 1 else inside_M // span
    key_M3 = torch.stack((row_M, start_M, group_M), dim=1)
    new_M = torch.ones_like(row_M, dtype=torch.bool)
    new_M[1:] = (key_M3[1:] != key_M3[:-1]).any(1)
    first_X = new_M.nonzero()[:, 0]
    stop_X = torch.cat((first_X, first_X.new_full((1,), len(row_M))))[1:]
    columns = (row_M[first_X], first_X, stop_X, start_M[first_X], index_M[first_X], index_M[stop_X - 1])
    return [_Run(*run) for run in torch.stack(columns, dim=1).tolist()]


def attend(
    query_MSNC: Tensor,
    keys_values: tuple[Tensor, Tensor],
    stretches: list[Stretch],
    *,
    own: Sequence[tuple[Tensor, Tensor]] = (),
    mask_MSJ: Tensor | None = None,
) -> Tensor:
    """softmax(q k / sqrt(C)) v of every query over the stretches' keys and its own: [M, S, N, C], in the queries' dtype.

    keys_values: the rows' shared keys and values [B, T, G, C]; own: pairs of [M, J_i, G, C], sum of J_i = J; mask_MSJ: which of its
    own a query sees; None: all. Every query must see a key. Softmax in fp32. Memory grows with M * S + T, and M * S * J.
    """
    flat = [tensor for pair in own for tensor in pair]
    attended: Tensor = _Attend.apply(query_MSNC, *keys_values, stretches, mask_MSJ, *flat)  # type: ignore[no-untyped-call]
    return attended


class _Attend(Function):
    """attend() and its gradient, both in parts."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, stretches: list[Stretch], mask: Tensor | None, *own: Tensor
    ) -> Tensor:
        M, S, N, C = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        with torch.autocast(query.device.type, enabled=False):
            if own:
                scores_MGXJ, _, own_value = _own(query.to(wide), own, mask)
                lse_MGX = scores_MGXJ.logsumexp(-1)
                lse = _queries_first(lse_MGX[..., None], S)[..., 0]
                out = _queries_first((scores_MGXJ - lse_MGX[..., None]).exp() @ own_value, S)
            else:
                lse = query.new_full((M, S, N), -torch.inf, dtype=wide)
                out = query.new_zeros((M, S, N, C), dtype=wide)
            for stretch in stretches:
                mine, theirs = slice(stretch.first, stretch.stop), slice(stretch.key_first, stretch.key_stop)
                keys, values = key[stretch.row, theirs], value[stretch.row, theirs]
                part, part_lse = flash(query[mine].flatten(0, 1), keys, values, causal=stretch.causal)
                both = torch.logaddexp(lse[mine], part_lse.reshape(-1, S, N))
                share, part_share = (lse[mine] - both).exp_(), (part_lse.reshape(-1, S, N) - both).exp_()
                out[mine].mul_(share[..., None]).add_(part.reshape(-1, S, N, C) * part_share[..., None])
                lse[mine] = both
            out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, mask, *own)
        ctx.stretches = stretches
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse, mask, *own = ctx.saved_tensors
        S = query.shape[1]
        wide = torch.promote_types(query.dtype, torch.float32)
        dkey, dvalue = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        with torch.autocast(query.device.type, enabled=False):
            dquery, down = _own_backward(grad.to(wide), query.to(wide), own, mask, out, lse)
            for stretch in ctx.stretches:
                mine, theirs = slice(stretch.first, stretch.stop), slice(stretch.key_first, stretch.key_stop)
                keys, values = key[stretch.row, theirs], value[stretch.row, theirs]
                of_queries = (x[mine].flatten(0, 1) for x in (grad, query, out, lse))
                found = flash_backward(*of_queries, key=keys, value=values, causal=stretch.causal)
                dquery[mine] += found[0].unflatten(0, (-1, S))
                dkey[stretch.row, theirs] += found[1]
                dvalue[stretch.row, theirs] += found[2]
        return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), None, None, *down


def _groups_first(x_MSNC: Tensor, num_groups: int) -> Tensor:
    """[M, G, S * R, C]: query heads that share a key-value head are rows of one matrix product."""
    M, S, N, C = x_MSNC.shape
    R = N // num_groups
    return x_MSNC.view(M, S, num_groups, R, C).transpose(1, 2).reshape(M, num_groups, S * R, C)


def _queries_first(x_MGXC: Tensor, num_queries: int) -> Tensor:
    """The way back: [M, S, N, C]."""
    M, G, X, C = x_MGXC.shape
    R = X // num_queries
    return x_MGXC.view(M, G, num_queries, R, C).transpose(1, 2).reshape(M, num_queries, G * R, C)


def _own(query_MSNC: Tensor, own: Sequence[Tensor], mask_MSJ: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [M, G, S * R, J] of the queries over their own keys, and these keys and values, [M, G, J, C]."""
    key, value = (torch.cat(list(x), dim=1).transpose(1, 2).to(query_MSNC.dtype) for x in (own[::2], own[1::2]))
    _, S, N, C = query_MSNC.shape
    G = key.shape[1]
    scores = _groups_first(query_MSNC, G) @ key.mT / math.sqrt(C)
    if mask_MSJ is not None:
        J = scores.shape[-1]
        scores.view(len(scores), G, S, N // G, J).masked_fill_(~mask_MSJ[:, None, :, None], -torch.inf)
    return scores, key, value


def _own_backward(
    grad: Tensor, query: Tensor, own: Sequence[Tensor], mask: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the queries, and of each of ``own``, through their own keys."""
    if not own:
        return torch.zeros_like(query), []
    S, C, G = query.shape[1], query.shape[3], own[0].shape[2]
    scores, key, value = _own(query, own, mask)
    weights = (scores - _groups_first(lse[..., None], G)).exp()
    delta = _groups_first((grad * out).sum(-1, keepdim=True), G)
    grad_MGXC = _groups_first(grad, G)
    dscores = weights * (grad_MGXC @ value.mT - delta) / math.sqrt(C)
    sizes = [tensor.shape[1] for tensor in own[::2]]
    dkeys = (dscores.mT @ _groups_first(query, G)).transpose(1, 2).split(sizes, dim=1)
    dvalues = (weights.mT @ grad_MGXC).transpose(1, 2).split(sizes, dim=1)
    down = [x.to(own[0].dtype) for pair in zip(dkeys, dvalues, strict=True) for x in pair]
    return _queries_first(dscores @ key, S), down
