"""What training, export and evaluation need of any drafter, and what it needs of its target."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from data.batch import Batch, StepOutput
from data.target_head import TargetHead
from drafters.slots import Places, draw, newest_positions


class FrozenTarget(NamedTuple):
    """The target's own tensors a drafter works with: its input embedding [V, H] and its head. Never trained, never saved."""

    embedding_VH: Tensor
    head: TargetHead

    @classmethod
    def of(cls, model: PreTrainedModel) -> "FrozenTarget":
        """The tensors of ``model``, sharing its storage."""
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        return cls(embedding.weight.detach(), TargetHead.of(model))


class Proposals(NamedTuple):
    """Greedy drafts behind many prefixes of packed rows: newest: the place of each prefix's last token, on the host; drafts_MK: on
    the device, int64 target ids proposed for the K positions behind it."""

    newest: Places
    drafts_MK: Tensor

    def where(self, chosen_M: Tensor) -> "Proposals":
        """Those that are chosen (bool)."""
        return Proposals(Places(*(x_M[chosen_M] for x_M in self.newest)), self.drafts_MK[chosen_M])


class Work(NamedTuple):
    """FLOPs of a training step's matrix products, six per weight and row that goes through it, less what no gradient needs: of each
    token of a row, of each place that is drafted from, of each label, of each of the target's states that judge them. Without
    attention's own products, as is usual."""

    token: float
    place: float
    label: float
    judge: float

    def of(self, *, tokens: float, places: float, labels: float, judges: float) -> float:
        """Of a step with so many."""
        return self.token * tokens + self.place * places + self.label * labels + self.judge * judges


def num_weights(*modules: nn.Module) -> int:
    """How many weights modules have."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def most_likely(logits: Callable[[slice], Tensor], num_rows: int) -> Tensor:
    """The argmax [M] of logits [M, W], of which logits() gives a slice of rows: an eighth of all at a time. (Not a number of rows:
    where weights are sharded, every process has to ask for them equally often, and how many rows it has is its own.)"""
    size = max(1, -(-num_rows // 8))
    return torch.cat([logits(slice(i * size, (i + 1) * size)).argmax(-1) for i in range(8)])


class Drafter(nn.Module):
    """The interface of every method in this folder. Each file also has draft(), the plain decode, and rebuild().

    num_drafts: how many tokens ahead it was trained to draft. num_queries: positions that its layers compute in training for every
    place drafted from. kept_W: int64 target ids of its draft vocabulary, ascending. work: what training it takes.
    """

    num_drafts: int
    num_queries: int
    kept_W: Tensor
    work: Work

    def forward(self, batch: Batch) -> StepOutput:
        """The loss of a batch."""
        raise NotImplementedError

    def loss_weight(self, batch: Batch) -> Tensor:
        """StepOutput.weight of this batch, without the forward, on the host or the device."""
        raise NotImplementedError

    def places_per_row(self, supervised: float) -> float:
        """From how many places of a packed row it is trained to draft, where so many of the tokens are supervised."""
        raise NotImplementedError

    def propose(self, batch: Batch, *, num_drafts: int) -> Proposals:
        """Greedy drafts behind every prefix that a server would draft behind."""
        raise NotImplementedError

    def forced_logits(self, batch: Batch, newest: Places, *, num_drafts: int) -> Iterator[Tensor]:
        """Yields, for drafts 0 .. num_drafts-1 behind the newest tokens, the logits [M, W] over the draft vocabulary, the text's
        own tokens having been drafted before."""
        raise NotImplementedError

    @torch.no_grad()
    def expected_length(self, batch: Batch, head: TargetHead, *, num_drafts: int, places: int = 256) -> tuple[Tensor, Tensor]:
        """(sum, number of prefixes) of the acceptance length to expect under sampling: 1 + sum_k prod_{i <= k} (1 - TV_i).

        See overlap(). The tokens before each draft are the text's own. Over at most ``places`` prefixes of each row, drawn evenly,
        behind which the answer goes on for num_drafts tokens.
        """
        # The features of one token at least stand before the newest one.
        text = batch.text
        newest_BT = newest_positions(text) & (text.positions_BT > 0)
        followed_BT = newest_BT.clone()
        for k in range(1, num_drafts):
            followed_BT[:, :-k] &= newest_BT[:, k:]
            followed_BT[:, -k:] = False
        newest = Places.where(draw(followed_BT, text.seed_B, count=places))
        reached_M = torch.ones(len(newest.row_M), device=batch.last_hidden_BTD.device)
        total = reached_M.sum()
        for k, logits_MW in enumerate(self.forced_logits(batch, newest, num_drafts=num_drafts)):
            reached_M = reached_M * self.overlap(logits_MW, newest.shifted(k).of(batch.last_hidden_BTD), head)
            total = total + reached_M.sum()
        return total, reached_M.new_tensor(len(reached_M))

    @torch.no_grad()
    def overlap(self, logits_RW: Tensor, last_RD: Tensor, head: TargetHead) -> Tensor:
        """1 - TV(p, q) [R], the chance that speculative sampling accepts a draft from q = softmax(logits) (arXiv 2211.17192).

        p is the target's distribution over its whole vocabulary, from its last hidden states; a token outside the draft
        vocabulary has q = 0.
        """
        found = []
        # Few rows of the whole vocabulary at a time.
        for logits, last in zip(logits_RW.split(128), last_RD.split(128), strict=True):
            p = torch.softmax(head.logits(last), dim=-1)[:, self.kept_W]
            found.append(torch.minimum(torch.softmax(logits.float(), dim=-1), p).sum(-1))
        return torch.cat(found)
