"""Packing loses nothing, repeats nothing, and depends on nothing but seed and epoch."""

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.packing import RowStream, collate, pack


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(50, 120), st.integers(0, 3))
def test_every_document_once_within_the_budget(lengths: list[int], row_tokens: int, epoch: int) -> None:
    rows = pack(lengths, row_tokens=row_tokens, seed=0, epoch=epoch, window=16)
    assert Counter(i for row in rows for i in row) == Counter(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= row_tokens for row in rows)
    assert rows == pack(lengths, row_tokens=row_tokens, seed=0, epoch=epoch, window=16)


def test_epochs_and_seeds_differ() -> None:
    lengths = [10] * 64
    first = pack(lengths, row_tokens=20, seed=0, epoch=0)
    assert first != pack(lengths, row_tokens=20, seed=0, epoch=1)
    assert first != pack(lengths, row_tokens=20, seed=1, epoch=0)


def test_best_fit_by_hand() -> None:
    """6 5 4 3 2 into rows of 10 fill two rows exactly: 6+4 and 5+3+2."""
    rows = pack([6, 5, 4, 3, 2], row_tokens=10, seed=0, epoch=0)
    assert sorted(sorted(row) for row in rows) == [[0, 2], [1, 3, 4]]


def test_few_slots_are_left_empty() -> None:
    """Lengths as of ShareGPT, log-normal with a median of 700 and a long tail cut at 4096: at most 3 % of the slots are padding."""
    rng = random.Random(0)
    lengths = [min(4096, max(20, round(rng.lognormvariate(math.log(700), 1.0)))) for _ in range(20_000)]
    rows = pack(lengths, row_tokens=4096, seed=0, epoch=0)
    assert sum(lengths) / (4096 * len(rows)) >= 0.97


def test_too_long_a_document_is_refused() -> None:
    with pytest.raises(ValueError, match="document 1 has 11 tokens, but a row holds 10"):
        pack([3, 11], row_tokens=10, seed=0, epoch=0)


def test_stream_goes_on_where_it_is_put() -> None:
    """Rows of a stream put to a saved place are those of one that never stopped, across an epoch's end."""
    lengths = [7, 9, 4, 12, 5, 8, 3]
    whole = RowStream(lengths, row_tokens=12, seed=3)
    before = whole.take(3)
    place = whole.epoch, whole.offset
    after = whole.take(9)
    resumed = RowStream(lengths, row_tokens=12, seed=3)
    resumed.seek(epoch=place[0], offset=place[1])
    assert resumed.take(9) == after
    per_epoch = pack(lengths, row_tokens=12, seed=3, epoch=0)
    assert [row.documents for row in (before + after)[: len(per_epoch)]] == per_epoch
    assert len({row.seed for row in before + after}) == 12


def test_collate_by_hand() -> None:
    rows = [[torch.tensor([1, 2]), torch.tensor([3])], [torch.tensor([4])]]
    assert collate(rows, fill=-1).tolist() == [[1, 2, 3], [4, -1, -1]]
