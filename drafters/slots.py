"""Places in packed rows that a drafter drafts from, and what the target said behind them.

All of it on the host, as the text is; only Places.of() reads what is on a device.

Shapes: B rows, T tokens, M places of all rows, K tokens behind each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from data.batch import Text, to_device


class Places(NamedTuple):
    """Places of all rows in one line: row_M, index_M, int64, row by row, ascending in each."""

    row_M: Tensor
    index_M: Tensor

    @classmethod
    def where(cls, chosen_BT: Tensor) -> "Places":
        """The places that are True."""
        return cls(*chosen_BT.nonzero(as_tuple=True))

    def shifted(self, by: int) -> "Places":
        """The places so many tokens on."""
        return Places(self.row_M, self.index_M + by)

    def of(self, x_BTX: Tensor) -> Tensor:
        """x [B, T, ...] at the places: [M, ...]."""
        # index_select has a far cheaper gradient than an index by two tensors.
        at_M = self.row_M * x_BTX.shape[1] + self.index_M
        return x_BTX.flatten(0, 1).index_select(0, to_device(at_M, x_BTX.device))


class Ahead(NamedTuple):
    """The K positions behind each place. index_MK: int64, inside the row; valid_MK: bool, True while every token up to there
    is the target's own and of the place's document; tokens_MK: int64."""

    index_MK: Tensor
    valid_MK: Tensor
    tokens_MK: Tensor


def ahead(text: Text, newest: Places, *, count: int) -> Ahead:
    """What the target said behind the newest tokens, ``count`` tokens far."""
    last = text.tokens_BT.shape[1] - 1
    row_M1 = newest.row_M[:, None]
    index_MK = newest.index_M[:, None] + torch.arange(1, count + 1)
    inside_MK = index_MK <= last
    index_MK = index_MK.clamp_max(last)
    same_MK = text.document_ids_BT[row_M1, index_MK] == newest.of(text.document_ids_BT)[:, None]
    own_MK = inside_MK & same_MK & text.loss_mask_BT[row_M1, index_MK]
    # cumprod has no bool.
    valid_MK = own_MK.to(torch.uint8).cumprod(-1).bool()
    return Ahead(index_MK, valid_MK, text.tokens_BT[row_M1, index_MK])


def newest_positions(text: Text) -> Tensor:
    """Bool [B, T]: a server drafts behind this token. It and the next one are the target's own, of one document.

    The first token of an answer comes from reading the prompt, so nothing is drafted behind the prompt's last token.
    """
    mask_BT, documents_BT = text.loss_mask_BT, text.document_ids_BT
    chosen_BT = torch.zeros_like(mask_BT)
    chosen_BT[:, :-1] = (
        mask_BT[:, :-1] & mask_BT[:, 1:] & (documents_BT[:, :-1] == documents_BT[:, 1:]) & (documents_BT[:, :-1] >= 0)
    )
    return chosen_BT


def draw(chosen_BT: Tensor, seed_B: Tensor, *, count: int) -> Tensor:
    """At most ``count`` of each row's True places, drawn without replacement: bool [B, T].

    The draw is a function of the row's seed alone (int64), whatever the device and however rows are dealt to devices.
    """
    T = chosen_BT.shape[1]
    if count >= T:
        return chosen_BT
    score_BT = mix(mix(seed_B)[:, None] + torch.arange(T)).masked_fill(~chosen_BT, -1)
    return torch.zeros_like(chosen_BT).scatter(1, score_BT.topk(count, dim=1).indices, True) & chosen_BT


def mix(x: Tensor) -> Tensor:
    """A well-mixed non-negative int64 for each int64 (the finaliser of MurmurHash3 in 31-bit steps, so that nothing overflows)."""
    x = x & 0x7FFFFFFF
    for factor, shift in ((0x45D9F3B, 16), (0x45D9F3B, 16), (0x2C1B3C6D, 15)):
        x = ((x ^ (x >> shift)) * factor) & 0x7FFFFFFF
    return x ^ (x >> 16)
