"""DFlash (arXiv 2602.06036): a block of drafts in one pass, each slot predicting the token at its own position.

The backbone, and a drawing of who sees what, are in drafters/block.py. Slot 0 is the anchor, which is known; slots 1 .. S-1 are
masks, and what comes out of slot k is the draft for position p + k: S - 1 drafts of a block of S. All positions of a block are
drafted blindly of one another, so a label k positions on is learned as the target's usual token there.

Shapes: B rows, T tokens, P anchors (padded per row), S queries of a block, K = S - 1 drafts, R labelled rows, A aux layers, D = H
width, W draft vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data.batch import Batch, StepOutput
from drafters.block import BlockConfig, BlockDrafter
from drafters.drafter import FrozenTarget
from drafters.layers import DrafterShape
from drafters.losses import Loss, dpace_weights, in_chunks, row_loss
from drafters.saved import Saved
from drafters.slots import Slots
from recipes.load import RecipeError, build


@dataclass(frozen=True)
class DFlashConfig(BlockConfig):
    """What a recipe says of a DFlash drafter.

    loss: ce learns the text's own tokens; the others the target's distribution. gamma: the label k positions behind the anchor
    weighs exp(-(k - 1) / gamma); the paper has 7, 5, 4 for blocks of 16, 10, 8. dpace_alpha: D-PACE (arXiv 2605.18810) weighs a
    position by what it adds to the expected acceptance instead, smoothed by alpha; null: off. own_mask_embedding: for a target
    without a reserved token: the mask's embedding is trained, and takes the place of that of mask_token_id, a rare token.
    """

    loss: Loss = "ce"
    gamma: float = 7.0
    dpace_alpha: float | None = None
    own_mask_embedding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma <= 0:
            raise RecipeError(f"gamma is {self.gamma}; give more than 0")
        if self.dpace_alpha is not None and not 0 <= self.dpace_alpha <= 1:
            raise RecipeError(f"dpace_alpha is {self.dpace_alpha}; give 0 to 1, or null for none")


class DFlashDrafter(BlockDrafter):
    """DFlash: its loss and its decode, over the backbone."""

    def __init__(
        self,
        shape: DrafterShape,
        config: DFlashConfig,
        *,
        kept_W: Tensor,
        target: FrozenTarget | None = None,
    ) -> None:
        super().__init__(shape, config, kept_W=kept_W, target=target)
        self.config = config
        self.num_drafts = config.block_size - 1
        if config.own_mask_embedding:
            start = torch.zeros(shape.hidden_size) if target is None else target.embedding_VH.float().mean(0)
            self.mask_embedding = nn.Parameter(start)

    def weights(self, counted_BPK: Tensor) -> Tensor:
        """exp(-(k - 1) / gamma) at the positions that count, 0 elsewhere; under D-PACE 1 where they count."""
        if self.config.dpace_alpha is not None:
            return counted_BPK.float()
        k = torch.arange(self.num_drafts, device=counted_BPK.device)
        return counted_BPK * torch.exp(-k / self.config.gamma)

    def loss_weight(self, batch: Batch) -> Tensor:
        """The weight of this batch in the loss, before any forward: what StepOutput.weight will be."""
        *_, counted_BPK = self.labels(batch)
        return self.weights(counted_BPK).sum()

    def judge(self, normed_RH: Tensor, last_RD: Tensor, label_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of rows, each on its own: the loss, the probability of the label, and whether the label is the most likely."""
        logits_RW = self.logits(normed_RH)
        p_RW = None if self.config.loss == "ce" else self.teacher_probabilities(last_RD)
        loss_R = row_loss(self.config.loss, logits_RW, label_R=label_R, p_RW=p_RW)
        with torch.no_grad():
            true_R = torch.softmax(logits_RW.float(), dim=-1).gather(-1, label_R[:, None])[:, 0]
            return loss_R, true_R, logits_RW.argmax(-1) == label_R

    def forward(self, batch: Batch) -> StepOutput:
        """The weighted sum of the losses at all positions that have a label which the drafter can say."""
        anchors, found, label_BPK, counted_BPK = self.labels(batch)
        normed_RH = self.run_blocks(batch, anchors, num_queries=self.config.block_size)[:, :, 1:][counted_BPK]
        loss_R, true_R, hit_R = in_chunks(self.judge, normed_RH, found.states(batch, counted_BPK), label_BPK[counted_BPK])
        weight_BPK = self.weights(counted_BPK)
        factor_BPK = weight_BPK
        if self.config.dpace_alpha is not None:
            true_BPK = torch.zeros_like(weight_BPK).masked_scatter(counted_BPK, true_R.to(weight_BPK.dtype))
            factor_BPK = dpace_weights(true_BPK, found.valid_BQK, alpha=self.config.dpace_alpha)
        hit_BPK = torch.zeros_like(counted_BPK).masked_scatter(counted_BPK, hit_R)
        pairs = zip(hit_BPK.sum((0, 1)).float(), found.valid_BQK.sum((0, 1)).float(), strict=True)
        metrics = {f"agreement_{k}": pair for k, pair in enumerate(pairs)}
        return StepOutput((factor_BPK[counted_BPK] * loss_R).sum(), weight_BPK.sum(), metrics)

    def forced_logits(self, batch: Batch, newest: Slots, *, num_drafts: int) -> Iterator[Tensor]:
        """See Drafter; a DFlash draft does not depend on the others' tokens."""
        normed_BPKH = self.run_blocks(batch, newest, num_queries=num_drafts + 1)[:, :, 1:]
        for k in range(num_drafts):
            yield self.logits(normed_BPKH[:, :, k])

    @torch.no_grad()
    def greedy_drafts(self, batch: Batch, newest: Slots, *, num_drafts: int) -> Tensor:
        """See BlockDrafter."""
        drafts = [self.kept_W[logits.argmax(-1)] for logits in self.forced_logits(batch, newest, num_drafts=num_drafts)]
        return torch.stack(drafts, dim=-1)

    @torch.no_grad()
    def draft(self, tokens: list[int], aux_hidden_TAD: Tensor, *, num_drafts: int) -> list[int]:
        """The plain decode: greedy drafts behind the prefix ``tokens``; vLLM's must equal these. See plain_block()."""
        normed_SH = self.plain_block(tokens, aux_hidden_TAD, num_queries=num_drafts + 1)
        drafts: list[int] = self.kept_W[self.logits(normed_SH[1:]).argmax(-1)].tolist()
        return drafts


def rebuild(saved: Saved, target: FrozenTarget | None) -> DFlashDrafter:
    """The drafter of a run folder, with its trained weights."""
    config = build(DFlashConfig, saved.description.config, "drafter.json config")
    drafter = DFlashDrafter(saved.description.shape, config, kept_W=saved.kept_W, target=target)
    drafter.load_state_dict(saved.weights)
    return drafter
