"""How many drafted tokens a server would accept, from drafts made behind every prefix of known greedy answers.

A server drafts behind the newest token it has, accepts the leading drafts that equal what the target goes on to say, adds the
target's own next token, and drafts again behind that. Given the drafts behind *every* prefix, this walk can be replayed.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from data.batch import Batch
from drafters.drafter import Proposals
from drafters.slots import ahead


class Acceptance(NamedTuple):
    """Counts as vLLM keeps them: num_drafts verifications, of which accepted[i] accepted the draft token at position i."""

    num_drafts: int
    accepted: tuple[int, ...]

    @property
    def length(self) -> float:
        """Acceptance length: tokens per target pass, the target's own included. 1 when nothing was drafted."""
        return 1.0 + sum(self.accepted) / max(self.num_drafts, 1)

    @property
    def per_position(self) -> tuple[float, ...]:
        """Share of the drafts accepted up to and including each position."""
        return tuple(count / max(self.num_drafts, 1) for count in self.accepted)

    def __add__(self, other: object) -> "Acceptance":
        assert isinstance(other, Acceptance)
        pairs = zip(self.accepted, other.accepted, strict=True)
        return Acceptance(self.num_drafts + other.num_drafts, tuple(a + b for a, b in pairs))


def leading_matches(batch: Batch, proposals: Proposals) -> Tensor:
    """Accepted tokens [M] of each draft: those that equal the row's own next tokens, up to the first that doesn't.

    The next tokens must be the target's own and of the same document, without a gap.
    """
    truth = ahead(batch.text, proposals.newest, count=proposals.drafts_MK.shape[-1])
    equal_MK = truth.valid_MK & (truth.tokens_MK == proposals.drafts_MK.cpu())
    return equal_MK.to(torch.uint8).cumprod(-1).sum(-1)


def serve_walk(newest: Iterable[int], matches: Iterable[int], *, num_drafts: int) -> Acceptance:
    """Replays serving over prefixes: (newest token's position, leading matches) pairs, ascending.

    A prefix within what was just accepted is passed over; a gap in positions is the start of the next answer.
    """
    drafts, accepted, free_from = 0, [0] * num_drafts, -1
    for position, count in zip(newest, matches, strict=True):
        if position < free_from:
            continue
        count = min(count, num_drafts)
        drafts += 1
        for i in range(count):
            accepted[i] += 1
        free_from = position + count + 1
    return Acceptance(drafts, tuple(accepted))


def acceptance(batch: Batch, proposals: Proposals, *, num_drafts: int) -> Acceptance:
    """Acceptance of a batch of greedy answers when a server drafts num_drafts tokens at a time."""
    matches_M = leading_matches(batch, proposals)
    row_M, index_M = proposals.newest
    # One row behind the other, so far apart that no accepted draft reaches from one to the next.
    positions_M = row_M * (batch.text.tokens_BT.shape[1] + num_drafts + 1) + index_M
    return serve_walk(positions_M.tolist(), matches_M.tolist(), num_drafts=num_drafts)
