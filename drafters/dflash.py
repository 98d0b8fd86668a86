"""DFlash (arXiv 2602.06036): a block of drafts in one pass, each slot predicting the token at its own position.

The backbone, and a drawing of who sees what, are in drafters/block.py. Slot 0 is the anchor, which is known; slots 1 .. S-1 are
masks, and what comes out of slot k is the draft for position p + k: S - 1 drafts of a block of S. All positions of a block are
drafted blindly of one another, so a label k positions on is learned as the target's usual token there.

Shapes: B rows, T tokens, M anchors of all rows, S queries of a block, K = S - 1 drafts, R labelled ones, A aux layers, D = H width,
W draft vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data.batch import Batch, StepOutput, to_device
from drafters.block import BlockConfig, BlockDrafter, Labels, pick
from drafters.drafter import FrozenTarget, most_likely
from drafters.layers import DrafterShape
from drafters.losses import Loss, LossWeights, dpace_weights, head_loss
from drafters.saved import Saved
from drafters.slots import Places
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
        if config.dpace_alpha is not None:  # one more pass over the head, forward
            self.work = self.work._replace(label=self.work.label + self.work.judge)
        if not LossWeights.of(config.loss).needs_teacher:
            self.work = self.work._replace(judge=0.0)
        if config.own_mask_embedding:
            start = torch.zeros(shape.hidden_size) if target is None else target.embedding_VH.float().mean(0)
            self.mask_embedding = nn.Parameter(start)

    def weights(self, draft: Tensor) -> Tensor:
        """exp(-k / gamma) of draft numbers k, from 0; under D-PACE 1."""
        return (
            torch.ones_like(draft, dtype=torch.float32)
            if self.config.dpace_alpha is not None
            else torch.exp(-draft / self.config.gamma)
        )

    def loss_weight(self, batch: Batch) -> Tensor:
        """The weight of this batch in the loss, before any forward: what StepOutput.weight will be."""
        return self.weights(self.labels(batch).draft_R).sum()

    def forward(self, batch: Batch) -> StepOutput:
        """The weighted sum of the losses at all positions that have a label which the drafter can say."""
        labels, weights = self.labels(batch), LossWeights.of(self.config.loss)
        normed_MKH = self.run_blocks(batch, labels.anchors, num_queries=self.config.block_size)[:, 1:]
        reads = [(pick(normed_MKH, labels), self.head_weight())]
        teacher = self.teacher_rows(batch, labels) if weights.needs_teacher else None
        device = normed_MKH.device
        label_R, draft_R = to_device(labels.label_R, device), to_device(labels.draft_R, device)
        weight_R = factor_R = self.weights(draft_R)
        if self.config.dpace_alpha is not None:
            factor_R = self.dpace(reads, labels, label_R)
        judged = head_loss(reads, weights, weight_R=factor_R, label_R=label_R, teacher=teacher)
        hits_K = weight_R.new_zeros(self.num_drafts).index_add(0, draft_R, judged.hit_R.to(weight_R.dtype))
        pairs = zip(hits_K, to_device(labels.found.valid_MK.sum(0).float(), device), strict=True)
        metrics = {f"agreement_{k}": pair for k, pair in enumerate(pairs)}
        return StepOutput(judged.loss_sum, weight_R.sum(), metrics, self.step_work(batch, labels, teacher))

    @torch.no_grad()
    def dpace(self, reads: list[tuple[Tensor, Tensor]], labels: Labels, label_R: Tensor) -> Tensor:
        """D-PACE's weights [R], from what the drafter thinks of the labels now: a pass over the head of their own. label_R: on the
        device."""
        assert self.config.dpace_alpha is not None
        ones_R = torch.ones_like(label_R, dtype=torch.float32)
        ce_R = head_loss(reads, LossWeights(ce=1.0), weight_R=ones_R, label_R=label_R, teacher=None).ce_R
        found = (labels.found.valid_MK, labels.anchor_R, labels.draft_R)
        valid_MK, anchor_R, draft_R = (to_device(x, label_R.device) for x in found)
        true_MK = torch.zeros_like(valid_MK, dtype=ce_R.dtype).index_put((anchor_R, draft_R), torch.exp(-ce_R))
        return dpace_weights(true_MK, valid_MK, alpha=self.config.dpace_alpha)[anchor_R, draft_R]

    def forced_logits(self, batch: Batch, newest: Places, *, num_drafts: int) -> Iterator[Tensor]:
        """See Drafter; a DFlash draft does not depend on the others' tokens."""
        normed_MKH = self.run_blocks(batch, newest, num_queries=num_drafts + 1)[:, 1:]
        for k in range(num_drafts):
            yield self.logits(normed_MKH[:, k])

    @torch.no_grad()
    def greedy_drafts(self, batch: Batch, newest: Places, *, num_drafts: int) -> Tensor:
        """See BlockDrafter."""
        normed_RH = self.run_blocks(batch, newest, num_queries=num_drafts + 1)[:, 1:].flatten(0, 1)
        drafts_R = most_likely(lambda rows: self.logits(normed_RH[rows]), len(normed_RH))
        drafts_MK: Tensor = self.kept_W[drafts_R].unflatten(0, (-1, num_drafts))
        return drafts_MK

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
