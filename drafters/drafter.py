"""What training, export and evaluation need of any drafter, and what it needs of its target."""

from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from data.batch import Batch, StepOutput
from data.target_head import TargetHead


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
    """Greedy drafts behind many prefixes of packed rows.

    newest_BQ: int64 row position of each prefix's last token, ascending in a row; valid_BQ: bool, False on padding;
    drafts_BQK: int64 target ids proposed for the K positions behind it.
    """

    newest_BQ: Tensor
    valid_BQ: Tensor
    drafts_BQK: Tensor


class Drafter(nn.Module):
    """The interface of every method in this folder. Each file also has draft(), the plain decode, and rebuild()."""

    def forward(self, batch: Batch) -> StepOutput:
        """The loss of a batch."""
        raise NotImplementedError

    def loss_weight(self, batch: Batch) -> Tensor:
        """StepOutput.weight of this batch, without the forward."""
        raise NotImplementedError

    def propose(self, batch: Batch, *, num_drafts: int) -> Proposals:
        """Greedy drafts behind every prefix that a server would draft behind."""
        raise NotImplementedError
