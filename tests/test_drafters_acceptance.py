"""Acceptance walked by hand, as vLLM's scheduler counts it."""

import torch

from data.batch import Batch, Text
from drafters.acceptance import Acceptance, acceptance, leading_matches, serve_walk
from drafters.drafter import Proposals
from drafters.slots import Places


def make_batch(tokens: list[int], documents: list[int], mask: list[int]) -> Batch:
    none = torch.zeros(1, len(tokens), 1)
    text = Text(
        torch.tensor([tokens]),
        torch.tensor([documents]),
        torch.zeros(1, len(tokens), dtype=torch.int64),
        torch.tensor([mask]).bool(),
        torch.zeros(1, dtype=torch.int64),
    )
    return Batch(text, none[..., None], none, torch.tensor([tokens]))


def in_row(index: torch.Tensor) -> Places:
    return Places(torch.zeros_like(index), index)


def test_leading_matches_by_hand() -> None:
    """Two documents 7 8 9 5 | 7 8 9: matches stop at the first miss, at a document's end and at an unsupervised token."""
    batch = make_batch([7, 8, 9, 5, 7, 8, 9], [0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 0, 1, 1])
    drafts = torch.tensor([[9, 5, 7], [5, 7, 8], [7, 8, 9], [9, 9, 9]])
    proposals = Proposals(in_row(torch.tensor([1, 2, 3, 5])), drafts)
    assert leading_matches(batch, proposals).tolist() == [2, 1, 0, 1]
    assert leading_matches(batch, proposals.where(torch.tensor([True, False, False, True]))).tolist() == [2, 1]


def test_walk_by_hand() -> None:
    """Prefixes at 4..9 with matches 2 9 0 1 0 3, three drafts at a time.

    At 4: 2 accepted, then the target's own token, so the next prefix ends at 7: 1 accepted, next at 9: 3 accepted.
    """
    walked = serve_walk([4, 5, 6, 7, 8, 9], [2, 9, 0, 1, 0, 3], num_drafts=3)
    assert walked == Acceptance(3, (3, 2, 1))
    assert walked.length == 1 + 6 / 3
    assert walked.per_position == (1.0, 2 / 3, 1 / 3)
    # One draft at a time: 4 (1), 6 (0), 7 (1), 9 (1).
    assert serve_walk([4, 5, 6, 7, 8, 9], [2, 9, 0, 1, 0, 3], num_drafts=1) == Acceptance(4, (3,))


def test_walk_starts_anew_behind_a_gap() -> None:
    """The next answer's first prefix is drafted behind, however far the last accepted draft reached."""
    assert serve_walk([2, 3, 10, 11], [2, 1, 0, 1], num_drafts=2) == Acceptance(3, (2, 1))


def test_perfect_drafter_reaches_the_largest_length() -> None:
    """Drafts copied from the row itself are all accepted: K + 1 tokens a pass, but for what the row's end cuts off."""
    tokens = list(range(3, 43))
    batch = make_batch(tokens, [0] * 40, [0] + [1] * 39)
    newest = torch.arange(1, 37)
    drafts = torch.stack([newest + 3 + k for k in (1, 2, 3)], dim=-1)
    measured = acceptance(batch, Proposals(in_row(newest), drafts), num_drafts=3)
    assert measured == Acceptance(9, (9, 9, 9))
    assert measured.length == 4.0


def test_rows_are_walked_apart() -> None:
    """A draft accepted to a row's very end leaves the next row's first prefix alone."""
    batch = make_batch([5, 5, 5, 5], [0] * 4, [1] * 4)
    batch = batch._replace(text=Text(*(x.expand(2, *x.shape[1:]) for x in vars(batch.text).values())))
    newest = Places(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]))
    measured = acceptance(batch, Proposals(newest, torch.full((3, 3), 5)), num_drafts=3)
    assert measured == Acceptance(2, (2, 2, 2))


def test_nothing_drafted() -> None:
    assert Acceptance(0, (0, 0)).length == 1.0
    assert Acceptance(1, (1, 0)) + Acceptance(2, (1, 1)) == Acceptance(3, (2, 1))
