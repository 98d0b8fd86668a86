"""Attention over a row's shared keys and over keys of one's own: a slot's later steps (EAGLE-3), a block (DFlash, DSpark).

Shapes: B rows, Q slots, T tokens, P anchors, S queries of a block, N query heads, G key-value heads (N a multiple of G), C head
size.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def causal_document_mask(documents_BT: Tensor, index_BQ: Tensor) -> Tensor:
    """Bool [B, Q, T]: the slot at row position index_BQ[b, q] may see key t, which is not later and of its document."""
    rows = torch.arange(documents_BT.shape[0], device=documents_BT.device)[:, None]
    same_BQT = documents_BT[rows, index_BQ][:, :, None] == documents_BT[:, None, :]
    return same_BQT & (torch.arange(documents_BT.shape[1], device=index_BQ.device) <= index_BQ[:, :, None])


def slot_attention(
    query_BQNC: Tensor,
    key_BTGC: Tensor,
    value_BTGC: Tensor,
    mask_BQT: Tensor,
    *,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
) -> Tensor:
    """softmax(q k / sqrt(C)) v of every slot over the masked step-0 keys and over its own keys of later steps.

    own_keys, own_values: one [B, Q, G, C] per later step; slot q sees entry q of each. mask_BQT: bool, at least one True per
    slot. Returns [B, Q, N, C]; softmax in fp32, of products in the queries' dtype (under autocast, bf16). Dense: memory grows
    with Q * T.
    """
    B, Q, N, C = query_BQNC.shape
    G = key_BTGC.shape[2]
    # Query heads of one key-value head become extra rows of its matrix product.
    query = query_BQNC.view(B, Q, G, N // G, C).permute(0, 2, 1, 3, 4) / math.sqrt(C)
    flat = query.reshape(B, G, Q * (N // G), C)
    scores = (flat @ key_BTGC.permute(0, 2, 3, 1)).float().view(B, G, Q, N // G, -1)
    scores = scores.masked_fill(~mask_BQT[:, None, :, None, :], -torch.inf)
    own = [(query.float() * key.permute(0, 2, 1, 3)[:, :, :, None, :].float()).sum(-1, keepdim=True) for key in own_keys]
    weights = torch.softmax(torch.cat([scores, *own], dim=-1), dim=-1).to(value_BTGC.dtype)
    T = key_BTGC.shape[1]
    past = weights[..., :T].reshape(B, G, Q * (N // G), T) @ value_BTGC.permute(0, 2, 1, 3)
    attended = past.view(B, G, Q, N // G, C)
    for step, value in enumerate(own_values):
        attended = attended + weights[..., T + step, None] * value.permute(0, 2, 1, 3)[:, :, :, None, :]
    return attended.permute(0, 2, 1, 3, 4).reshape(B, Q, N, C)


def block_masks(
    documents_BT: Tensor, anchor_BP: Tensor, *, num_queries: int, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """What the queries of blocks may see: (of the context, bool [B, P, S or 1, T]; of their own block, bool [S, S]).

    The context ends before the anchor: the target has not read that one when a server drafts. causal: a query sees its own
    block up to itself. window: a query sees positions less than that many away, on either side.
    """
    rows = torch.arange(len(anchor_BP), device=anchor_BP.device)[:, None]
    same_BPT = documents_BT[rows, anchor_BP][:, :, None] == documents_BT[:, None, :]
    index_T = torch.arange(documents_BT.shape[1], device=anchor_BP.device)
    context_BPST = (same_BPT & (index_T < anchor_BP[:, :, None]))[:, :, None]
    offset_S = torch.arange(num_queries, device=anchor_BP.device)
    distance_SS = offset_S[:, None] - offset_S
    own_SS = distance_SS >= 0 if causal else torch.ones_like(distance_SS, dtype=torch.bool)
    if window is not None:
        at_BPS = anchor_BP[:, :, None] + offset_S
        context_BPST = context_BPST & (at_BPS[..., None] - index_T < window)
        own_SS = own_SS & (distance_SS.abs() < window)
    return context_BPST, own_SS


def block_attention(
    query_BPSNC: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], masks: tuple[Tensor, Tensor]
) -> Tensor:
    """softmax(q k / sqrt(C)) v of every block query over the context and its own block: [B, P, S, N, C].

    context: keys and values [B, T, G, C]; own: keys and values [B, P, S, G, C]; masks: as block_masks() gives them; every query
    sees itself. Softmax in fp32, of products in the queries' dtype. Dense: memory grows with P * S * T.
    """
    (key_BTGC, value_BTGC), (own_key_BPSGC, own_value_BPSGC), (context_mask_BPST, own_mask_SS) = context, own, masks
    B, P, S, N, C = query_BPSNC.shape
    G, T = key_BTGC.shape[2], key_BTGC.shape[1]
    R = N // G
    query = (query_BPSNC.view(B, P, S, G, R, C) / math.sqrt(C)).permute(0, 3, 1, 2, 4, 5)
    scores = (query.reshape(B, G, P * S * R, C) @ key_BTGC.permute(0, 2, 3, 1)).float().view(B, G, P, S, R, T)
    scores = scores.masked_fill(~context_mask_BPST[:, None, :, :, None, :], -torch.inf)
    own_scores = (query.reshape(B, G, P, S * R, C) @ own_key_BPSGC.permute(0, 3, 1, 4, 2)).float().view(B, G, P, S, R, S)
    own_scores = own_scores.masked_fill(~own_mask_SS[:, None, :], -torch.inf)
    weights = torch.softmax(torch.cat((scores, own_scores), dim=-1), dim=-1).to(value_BTGC.dtype)
    attended = (weights[..., :T].reshape(B, G, P * S * R, T) @ value_BTGC.permute(0, 2, 1, 3)).view(B, G, P, S, R, C)
    attended = attended + (weights[..., T:].reshape(B, G, P, S * R, S) @ own_value_BPSGC.permute(0, 3, 1, 2, 4)).view_as(attended)
    return attended.permute(0, 2, 3, 1, 4, 5).reshape(B, P, S, N, C)
