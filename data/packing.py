"""Documents packed into rows of a token budget, in an order that is a function of (seed, epoch) alone.

So a resumed run, or one on more processes, sees the same rows in the same steps.
"""

import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from data.batch import Document


def lengths_of(docs: Sequence[Document]) -> list[int]:
    """Tokens of each document; without reading them, where that is known."""
    known: list[int] | None = getattr(docs, "lengths", None)
    return [len(document.tokens_T) for document in docs] if known is None else known


def pack(lengths: Sequence[int], *, row_tokens: int, seed: int, epoch: int, window: int = 512) -> list[list[int]]:
    """Rows of document indices whose lengths sum to at most row_tokens; every document once.

    Documents are shuffled, then packed best-fit within windows of ``window`` documents, longest first, and the rows shuffled
    again, so that short and long rows mix. Raises ValueError for a document longer than a row.
    """
    if too_long := [i for i, length in enumerate(lengths) if length > row_tokens]:
        raise ValueError(f"document {too_long[0]} has {lengths[too_long[0]]} tokens, but a row holds {row_tokens}")
    rng = random.Random(f"{seed}-{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    rows: list[list[int]] = []
    for start in range(0, len(order), window):
        free: list[tuple[int, int]] = []  # (room left, row), ascending
        for document in sorted(order[start : start + window], key=lambda i: -lengths[i]):
            place = bisect_left(free, (lengths[document], 0))
            if place < len(free):
                space, row = free.pop(place)
                rows[row].append(document)
            else:
                space, row = row_tokens, len(rows)
                rows.append([document])
            if space > lengths[document]:
                insort(free, (space - lengths[document], row))
    rng.shuffle(rows)
    return rows


class Row(NamedTuple):
    """documents: their indices. seed: for random choices within the row; another one for every row of every epoch."""

    documents: list[int]
    seed: int


class RowStream:
    """Packed rows without end, epoch after epoch; (epoch, offset) says where it stands and puts it there again."""

    def __init__(self, lengths: Sequence[int], *, row_tokens: int, seed: int) -> None:
        self.lengths, self.row_tokens, self.seed = lengths, row_tokens, seed
        self.seek(epoch=0, offset=0)

    def seek(self, *, epoch: int, offset: int) -> None:
        """Goes to row ``offset`` of an epoch, both from 0."""
        self.epoch, self.offset = epoch, offset
        self.rows = pack(self.lengths, row_tokens=self.row_tokens, seed=self.seed, epoch=epoch)

    def take(self, count: int) -> list[Row]:
        """The next ``count`` rows."""
        taken: list[Row] = []
        while len(taken) < count:
            if self.offset == len(self.rows):
                self.seek(epoch=self.epoch + 1, offset=0)
            rng = random.Random(f"{self.seed}-{self.epoch}-{self.offset}")
            taken.append(Row(self.rows[self.offset], rng.getrandbits(31)))
            self.offset += 1
        return taken


def collate(pieces: Sequence[Sequence[Tensor]], *, fill: int | float | bool) -> Tensor:
    """Rows of concatenated per-document tensors [T_i, ...], padded at the end with ``fill``: [B, T, ...]."""
    rows = [torch.cat(list(row)) for row in pieces]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
