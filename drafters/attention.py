"""Attention of the training-time test: shared step-0 keys, and each slot's own later keys.

Shapes: B rows, Q slots, T tokens, N query heads, G key-value heads (N a multiple of G), C head size.
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
    slot. Returns [B, Q, N, C]; scores and softmax in fp32. Dense: memory grows with Q * T.
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
