"""DSpark (arXiv 2607.05147): DFlash's block, in which each draft knows the one before it, and how sure it may be.

The backbone is drafters/block.py. What comes out of slot k is for position p + k + 1, the anchor's own slot included: S drafts
of a block of S. Two small heads are added:

    Markov head      logits_k = head(h_k) + W2 W1[token before]: the drafts of a block are no longer blind of one another. In
                     training the token before is the text's own, in decoding the draft just made, left to right.
    confidence head  sigmoid(w . [h_k ; W1[token before]] + b): the chance that draft k is accepted, given those before it were.

Shapes: B rows, T tokens, M anchors of all rows, S = K queries and drafts of a block, R labelled ones, A aux layers, D = H width, V
target vocabulary, W draft vocabulary, X Markov rank.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from data.batch import Batch, StepOutput, Text, to_device
from data.target_head import TargetHead
from drafters.block import BlockConfig, BlockDrafter, pick
from drafters.drafter import FrozenTarget, most_likely
from drafters.layers import DrafterShape
from drafters.losses import LossWeights, head_loss
from drafters.saved import Saved
from drafters.slots import Ahead, Places, ahead, newest_positions
from recipes.load import RecipeError, build


@dataclass(frozen=True)
class DSparkConfig(BlockConfig):
    """What a recipe says of a DSpark drafter; the paper's weights.

    markov_rank: width of the Markov head. gamma: draft k, from 0, weighs exp(-k / gamma). ce_weight: of the text's own token;
    l1_weight: of |q - p|_1, twice the total variation; confidence_weight: of the confidence head's cross-entropy. confidence: what
    it is the chance of. sampled: that speculative sampling accepts the draft, 1 - |q - p|_1 / 2; greedy: that the most likely
    draft is the text's own token, for answers that are served at temperature 0. With a reduced vocabulary, p is the target's
    distribution given that its token is in there; the scaling behind training is fitted on what is accepted, without that.
    """

    block_size: int = 7
    markov_rank: int = 256
    gamma: float = 4.0
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    confidence: Literal["sampled", "greedy"] = "sampled"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma <= 0:
            raise RecipeError(f"gamma is {self.gamma}; give more than 0")


class MarkovHead(nn.Module):
    """W2 W1[token]: what the token before says of the next one. W1 is over the target's vocabulary, W2 over the draft's."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """One logit from a slot's output and the Markov embedding of the token before."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)


class DSparkDrafter(BlockDrafter):
    """DSpark: its heads, its loss and its decode, over the backbone."""

    def __init__(
        self,
        shape: DrafterShape,
        config: DSparkConfig,
        *,
        kept_W: Tensor,
        target: FrozenTarget | None = None,
    ) -> None:
        super().__init__(shape, config, kept_W=kept_W, target=target)
        self.config = config
        self.num_drafts = config.block_size
        self.work = self.work._replace(label=self.work.label + 6.0 * config.markov_rank * len(kept_W))
        self.markov_head = MarkovHead(shape.vocab_size, len(kept_W), config.markov_rank)
        self.confidence_head = ConfidenceHead(shape.hidden_size + config.markov_rank)
        # No correction and a confidence of one half, until learned. Rows of W1 are as long as torch has them: with short ones the
        # correction, a product of two small factors, would hardly move at first.
        for start in (self.markov_head.markov_w2.weight, self.confidence_head.proj.weight, self.confidence_head.proj.bias):
            nn.init.zeros_(start)

    # -- training ------------------------------------------------------------------------------------------------------

    def weights(self, draft: Tensor) -> Tensor:
        """exp(-k / gamma) of draft numbers k, from 0."""
        return torch.exp(-draft / self.config.gamma)

    def loss_weight(self, batch: Batch) -> Tensor:
        """The weight of this batch in the loss, before any forward: what StepOutput.weight will be."""
        return self.weights(self.labels(batch).draft_R).sum()

    def draft_logits(self, normed: Tensor, markov: Tensor) -> Tensor:
        """Draft logits [R, W] from slots' outputs [R, H] and the Markov embeddings [R, X] of the tokens before."""
        correction: Tensor = self.markov_head.markov_w2(markov)
        return self.logits(normed) + correction

    def confidence(self, normed: Tensor, markov: Tensor) -> Tensor:
        """Confidence logits [...] from a slot's output [..., H] and the Markov embedding [..., X] of the token before.

        It learns from both without changing them: they go in detached. In fp32, as vLLM has it.
        """
        proj = self.confidence_head.proj
        features = torch.cat((normed, markov), dim=-1).detach().float()
        return (features * proj.weight[0].float()).sum(-1) + proj.bias.float()

    def forward(self, batch: Batch) -> StepOutput:
        """sum over rows of w_k (0.1 CE + 0.9 |q - p|_1 + BCE(confidence, chance)), with the config's weights and the chance it
        names; the text's own tokens before each draft."""
        config, labels = self.config, self.labels(batch)
        normed_RH = pick(self.run_blocks(batch, labels.anchors, num_queries=self.num_drafts), labels)
        before_MK = tokens_before(batch.text, labels.anchors, labels.found)
        device = normed_RH.device
        before_R, label_R, draft_R = (to_device(x, device) for x in (pick(before_MK, labels), labels.label_R, labels.draft_R))
        markov_RX = self.markov_head.markov_w1(before_R)
        weight_R, teacher = self.weights(draft_R), self.teacher_rows(batch, labels)
        judged = head_loss(
            [(normed_RH, self.head_weight()), (markov_RX, self.markov_head.markov_w2.weight)],
            LossWeights(ce=config.ce_weight, tv=2 * config.l1_weight),
            weight_R=weight_R,
            label_R=label_R,
            teacher=teacher,
        )
        accepted_R, hit_R = 1.0 - judged.tv_R, judged.hit_R.float()
        chance_R = hit_R if config.confidence == "greedy" else accepted_R.float()
        confidence_R = self.confidence(normed_RH, markov_RX)
        bce_R = nn.functional.binary_cross_entropy_with_logits(confidence_R, chance_R, reduction="none")
        loss_sum = judged.loss_sum + config.confidence_weight * (weight_R * bce_R).sum()
        sums = {"ce": judged.ce_R, "accepted": accepted_R, "confidence_bce": bce_R, "agreement": hit_R}
        count = torch.ones_like(weight_R).sum()
        metrics = {name: (values.detach().sum(), count) for name, values in sums.items()}
        return StepOutput(loss_sum, weight_R.sum(), metrics, self.step_work(batch, labels, teacher))

    # -- decoding ------------------------------------------------------------------------------------------------------

    def _rows_logits(self, normed_MH: Tensor, markov_MX: Tensor, rows: slice) -> Tensor:
        return self.draft_logits(normed_MH[rows], markov_MX[rows])

    def forced_logits(self, batch: Batch, newest: Places, *, num_drafts: int) -> Iterator[Tensor]:
        """See Drafter."""
        normed_MKH = self.run_blocks(batch, newest, num_queries=num_drafts)
        before_MK = tokens_before(batch.text, newest, ahead(batch.text, newest, count=num_drafts))
        markov_MKX = self.markov_head.markov_w1(to_device(before_MK, normed_MKH.device))
        for k in range(num_drafts):
            yield self.draft_logits(normed_MKH[:, k], markov_MKX[:, k])

    @torch.no_grad()
    def greedy_drafts(self, batch: Batch, newest: Places, *, num_drafts: int) -> Tensor:
        """See BlockDrafter."""
        normed_MKH = self.run_blocks(batch, newest, num_queries=num_drafts)
        drafts = [to_device(newest.of(batch.text.tokens_BT), normed_MKH.device)]
        for k in range(num_drafts):
            logits = partial(self._rows_logits, normed_MKH[:, k], self.markov_head.markov_w1(drafts[-1]))
            drafts.append(self.kept_W[most_likely(logits, len(normed_MKH))])
        return torch.stack(drafts[1:], dim=-1)

    @torch.no_grad()
    def judge_confidence(self, batches: Iterable[Batch], head: TargetHead) -> tuple[Tensor, Tensor, Tensor]:
        """Of the K drafts behind every prefix, the text's own tokens before each: confidence logits [R, K]; whether it is accepted,
        for "sampled" by one draw of that chance; and whether it is reached: all before it are, and the answer goes on that far.
        On the CPU, of all batches.
        """
        luck = torch.Generator(self.kept_W.device).manual_seed(0)
        parts = [[part.cpu() for part in self._judge_confidence(batch, head, luck)] for batch in batches]
        logits_RK, accepted_RK, reached_RK = (torch.cat(part) for part in zip(*parts, strict=True))
        return logits_RK, accepted_RK, reached_RK

    def _judge_confidence(self, batch: Batch, head: TargetHead, luck: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        newest = Places.where(newest_positions(batch.text))
        truth = ahead(batch.text, newest, count=self.num_drafts)
        normed_MKH = self.run_blocks(batch, newest, num_queries=self.num_drafts)
        before_MK = to_device(tokens_before(batch.text, newest, truth), normed_MKH.device)
        markov_MKX = self.markov_head.markov_w1(before_MK)
        accepted = []
        for k in range(self.num_drafts):  # one after the other: the logits of all would be K times as many
            logits_MW = self.draft_logits(normed_MKH[:, k], markov_MKX[:, k])
            if self.config.confidence == "greedy":
                accepted.append(self.kept_W[logits_MW.argmax(-1)].cpu() == truth.tokens_MK[:, k])
            else:
                last_MD = Places(newest.row_M, truth.index_MK[:, k] - 1).of(batch.last_hidden_BTD)
                chance_M = self.overlap(logits_MW, last_MD, head)
                accepted.append((torch.rand(chance_M.shape, generator=luck, device=chance_M.device) < chance_M).cpu())
        accepted_MK, reached_MK = torch.stack(accepted, dim=-1), truth.valid_MK
        reached_MK[:, 1:] &= accepted_MK[:, :-1].to(torch.uint8).cumprod(-1).bool()
        return self.confidence(normed_MKH, markov_MKX), accepted_MK, reached_MK

    @torch.no_grad()
    def draft(self, tokens: list[int], aux_hidden_TAD: Tensor, *, num_drafts: int) -> list[int]:
        """The plain decode: greedy drafts behind the prefix ``tokens``; vLLM's must equal these. See plain_block()."""
        normed_SH = self.plain_block(tokens, aux_hidden_TAD, num_queries=num_drafts)
        drafts: list[int] = []
        before = tokens[-1]
        for normed_H in normed_SH:
            correction_W = self.markov_head.markov_w2.weight @ self.markov_head.markov_w1.weight[before]
            before = int(self.kept_W[(self.logits(normed_H[None])[0] + correction_W).argmax()])
            drafts.append(before)
        return drafts


def tokens_before(text: Text, newest: Places, found: Ahead) -> Tensor:
    """The text's own token before each draft behind the newest tokens, [M, K]."""
    return torch.cat((newest.of(text.tokens_BT)[:, None], found.tokens_MK[:, :-1]), dim=-1)


def rebuild(saved: Saved, target: FrozenTarget | None) -> DSparkDrafter:
    """The drafter of a run folder, with its trained weights."""
    config = build(DSparkConfig, saved.description.config, "drafter.json config")
    drafter = DSparkDrafter(saved.description.shape, config, kept_W=saved.kept_W, target=target)
    drafter.load_state_dict(saved.weights)
    return drafter
