"""What a drafter learns from: documents, and packed rows of them with the frozen target's features.

Shapes everywhere: B rows, T tokens, A aux layers, D target width, H drafter width, V target vocabulary,
W draft vocabulary, Q drafting slots, K draft positions.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Document(NamedTuple):
    """One tokenised conversation: int64 tokens_T, bool loss_mask_T (True where the target produced the token). greedy: the target
    took its most likely token each time, so that the tokens are its argmax, too."""

    id: str
    tokens_T: Tensor
    loss_mask_T: Tensor
    greedy: bool = False


@dataclass(frozen=True, eq=False)
class Text:
    """What is known of packed rows before the target reads them. On the host, where drafters plan from it what is learned of which
    token: on the device the answers would have to be waited for. (No tuple: engines move the tensors of tuples to the device.)

    tokens_BT: int64 token ids of the target.
    document_ids_BT: int64; equal within one document of a row, -1 on padding.
    positions_BT: int64, counted from 0 in each document.
    loss_mask_BT: bool, True where the *token at that index* was produced by the target.
    seed_B: int64; random choices within a row are a function of it, so that they do not depend on which device has the row.
    """

    tokens_BT: Tensor
    document_ids_BT: Tensor
    positions_BT: Tensor
    loss_mask_BT: Tensor
    seed_B: Tensor


class Batch(NamedTuple):
    """Packed rows: their text, and on the device what the target makes of it.

    aux_hidden_BTAD: hidden states of the aux layers; layer id k is the state after k decoder layers (0: embeddings).
    last_hidden_BTD: the input of the target's lm_head, that is, after its final norm.
    argmax_BT: int64, the target's most likely *next* token after each index, over its full vocabulary, or what it served greedily;
        -1 where the next token is not supervised.
    """

    text: Text
    aux_hidden_BTAD: Tensor
    last_hidden_BTD: Tensor
    argmax_BT: Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x there, without waiting for what a GPU was told to do before: a copy of memory that is not pinned, or of some columns of
    it, would."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.contiguous().pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, x: Tensor) -> None:
        self.copy, self.there = x.detach(), None
        if x.is_cuda:
            self.copy = torch.empty_like(self.copy, device="cpu", pin_memory=True).copy_(self.copy, non_blocking=True)
            self.there = torch.Event(x.device)
            self.there.record()

    def read(self) -> list[float]:
        """Its numbers; waits for them, but not for what the device was told to do since."""
        if self.there is not None:
            self.there.synchronize()
        numbers: list[float] = self.copy.tolist()
        return numbers


class StepOutput(NamedTuple):
    """What a drafter returns for one batch: sums and counts only, never means, so that batches and ranks add up.

    loss_sum: weighted sum of the per-row losses, fp32 scalar with gradient.
    weight: sum of those weights, fp32 scalar; the loop divides by its total over the optimiser window and all ranks. (Under D-PACE,
        whose weights no one knows before the forward, the number of rows.)
    metrics: name -> (sum, count), fp32 scalars without gradient.
    work: FLOPs of its matrix products, backward included.
    """

    loss_sum: Tensor
    weight: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]
    work: float
