"""Places in packed rows that a drafter drafts from, and what the target said behind them.

Shapes: B rows, T tokens, Q places (padded per row), K tokens behind each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from data.batch import Batch


class Slots(NamedTuple):
    """Chosen places of every row. index_BQ: int64 position in the row, ascending, 0 on padding; valid_BQ: bool."""

    index_BQ: Tensor
    valid_BQ: Tensor

    @classmethod
    def where(cls, chosen_BT: Tensor) -> "Slots":
        """The places that are True; at least one slot wide, padding or not."""
        width = max(int(chosen_BT.sum(1).max()), 1)
        # A stable sort of "not chosen" puts the chosen first, in order.
        index_BQ = (~chosen_BT).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        valid_BQ = chosen_BT.gather(1, index_BQ)
        return cls(index_BQ.masked_fill(~valid_BQ, 0), valid_BQ)

    def split(self, size: int) -> list["Slots"]:
        """The same places in groups of at most ``size`` of each row."""
        return [Slots(*parts) for parts in zip(self.index_BQ.split(size, 1), self.valid_BQ.split(size, 1), strict=True)]

    def gather(self, x_BTX: Tensor) -> Tensor:
        """x [B, T, ...] at the slots: [B, Q, ...]."""
        rows = torch.arange(x_BTX.shape[0], device=x_BTX.device)[:, None]
        return x_BTX[rows, self.index_BQ]


class Ahead(NamedTuple):
    """The K positions behind each place. index_BQK: int64, inside the row; valid_BQK: bool, True while every token up to there
    is the target's own and of the place's document; tokens_BQK: int64."""

    index_BQK: Tensor
    valid_BQK: Tensor
    tokens_BQK: Tensor

    def states(self, batch: Batch, chosen_BQK: Tensor) -> Tensor:
        """The target's last hidden states [R, D] that predicted the chosen tokens: those one position before them."""
        rows_R, _, _ = chosen_BQK.nonzero(as_tuple=True)
        return batch.last_hidden_BTD[rows_R, self.index_BQK[chosen_BQK] - 1]


def ahead(batch: Batch, newest_BQ: Tensor, valid_BQ: Tensor, *, count: int) -> Ahead:
    """What the target said behind the tokens at newest_BQ, ``count`` tokens far."""
    last = batch.tokens_BT.shape[1] - 1
    index_BQK = newest_BQ[:, :, None] + torch.arange(1, count + 1, device=newest_BQ.device)
    inside_BQK = index_BQK <= last
    index_BQK = index_BQK.clamp_max(last)
    rows = torch.arange(len(newest_BQ), device=newest_BQ.device)[:, None, None]
    same_BQK = batch.document_ids_BT[rows, index_BQK] == batch.document_ids_BT.gather(1, newest_BQ)[:, :, None]
    own_BQK = inside_BQK & same_BQK & batch.loss_mask_BT[rows, index_BQK]
    # cumprod has no bool.
    valid_BQK = (own_BQK & valid_BQ[:, :, None]).to(torch.uint8).cumprod(-1).bool()
    return Ahead(index_BQK, valid_BQK, batch.tokens_BT[rows, index_BQK])


def newest_positions(batch: Batch) -> Tensor:
    """Bool [B, T]: a server drafts behind this token. It and the next one are the target's own, of one document.

    The first token of an answer comes from reading the prompt, so nothing is drafted behind the prompt's last token.
    """
    mask_BT, documents_BT = batch.loss_mask_BT, batch.document_ids_BT
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
    score_BT = mix(mix(seed_B)[:, None] + torch.arange(T, device=chosen_BT.device)).masked_fill(~chosen_BT, -1)
    return torch.zeros_like(chosen_BT).scatter(1, score_BT.topk(count, dim=1).indices, True) & chosen_BT


def mix(x: Tensor) -> Tensor:
    """A well-mixed non-negative int64 for each int64 (the finaliser of MurmurHash3 in 31-bit steps, so that nothing overflows)."""
    x = x & 0x7FFFFFFF
    for factor, shift in ((0x45D9F3B, 16), (0x45D9F3B, 16), (0x2C1B3C6D, 15)):
        x = ((x ^ (x >> shift)) * factor) & 0x7FFFFFFF
    return x ^ (x >> 16)
