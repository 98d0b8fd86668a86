"""The target's output head: from its last hidden state to next-token logits, over all or some of its vocabulary."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel


class TargetHead(NamedTuple):
    """lm_head rows of a frozen target and what the target does to its logits afterwards.

    weight_VD, bias_V: rows of lm_head. scale: factor on the logits (Cohere, Granite). soft_cap: c in c * tanh(x / c)
    (Gemma 2), or None.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    soft_cap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "TargetHead":
        """The head of ``model``, sharing its storage."""
        lm_head = model.get_output_embeddings()
        assert isinstance(lm_head, torch.nn.Linear), f"lm_head of {type(model).__name__} is not a linear layer"
        scale, soft_cap = logit_transform(model.config)
        return cls(lm_head.weight.detach(), None if lm_head.bias is None else lm_head.bias.detach(), scale, soft_cap)

    def transform(self) -> dict[str, float | None]:
        """What is done to the logits, as plain values."""
        return {"scale": self.scale, "soft_cap": self.soft_cap}

    def rows(self, kept_W: Tensor) -> "TargetHead":
        """The same head over the kept token ids only (int64, in the order wanted); where those are all, it shares its storage."""
        if len(kept_W) == len(self.weight_VD) and bool((kept_W[1:] > kept_W[:-1]).all()):
            return self
        bias = None if self.bias_V is None else self.bias_V[kept_W]
        return self._replace(weight_VD=self.weight_VD[kept_W], bias_V=bias)

    @torch.no_grad()
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits [R, V], fp32 at least, of hidden states [R, D]; without gradient."""
        logits_RV = head_logits([(hidden_RD.to(self.weight_VD.dtype), self.weight_VD)])
        if self.bias_V is not None:
            logits_RV += self.bias_V
        logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
        if self.scale != 1.0:
            logits_RV = logits_RV * self.scale
        return logits_RV if self.soft_cap is None else self.soft_cap * torch.tanh(logits_RV / self.soft_cap)

    def argmax(self, hidden_RD: Tensor, *, chunk: int = 256) -> Tensor:
        """Most likely token ids [R], int64, without ever holding R x V logits."""
        hidden_RD = hidden_RD.to(self.weight_VD.dtype)
        # One room for all chunks: on a CPU new memory costs as much as the product. Scale and soft cap change no order.
        room = hidden_RD.new_empty(min(chunk, len(hidden_RD)), len(self.weight_VD))
        found = []
        for part in hidden_RD.split(chunk):
            logits_RV = head_logits([(part, self.weight_VD)], room[: len(part)])
            found.append(first_argmax(logits_RV if self.bias_V is None else logits_RV.add_(self.bias_V)))
        return torch.cat(found)


@torch.no_grad()
def head_logits(reads: Sequence[tuple[Tensor, Tensor]], out_RV: Tensor | None = None) -> Tensor:
    """The sum over ``reads`` of x @ weight.T [R, V], pairs of x [R, D] and weight [V, D], in their dtype, in out_RV if given;
    without gradient.

    Few rows times a whole vocabulary: on a CPU, in blocks of 256 words a thread, whose logits stay in its caches while they are
    summed up, 1.2 to 1.6 times as fast as in one piece.
    """
    (first, weight), *others = reads
    out_RV = first.new_empty(len(first), len(weight)) if out_RV is None else out_RV
    block = 256 * torch.get_num_threads() if first.device.type == "cpu" else len(weight)
    for start in range(0, len(weight), block):
        words = slice(start, start + block)
        part_RV = torch.mm(first, weight[words].T, out=out_RV[:, words])
        for x, other in others:
            part_RV.addmm_(x, other[words].T)
    return out_RV


def first_argmax(x_RV: Tensor, *, block: int = 64) -> Tensor:
    """x.argmax(-1). On a CPU torch compares one by one; here whole blocks are, and then one of them: six times as fast."""
    whole = x_RV.shape[1] // block * block
    if x_RV.device.type != "cpu" or not whole:
        return x_RV.argmax(-1)
    blocks = x_RV[:, :whole].unflatten(1, (-1, block))
    most, which_R = blocks.amax(-1).max(-1)
    found_R: Tensor = which_R * block + blocks[torch.arange(len(x_RV)), which_R].argmax(-1)
    if whole < x_RV.shape[1]:
        rest, where_R = x_RV[:, whole:].max(-1)
        found_R = torch.where(rest > most, whole + where_R, found_R)
    return found_R


def logit_transform(config: PreTrainedConfig) -> tuple[float, float | None]:
    """(scale, soft cap) that a target of this config applies to its logits after lm_head."""
    text = config.get_text_config()
    scale = float(getattr(text, "logit_scale", None) or 1.0)
    scale /= float(getattr(text, "logits_scaling", None) or 1.0)
    return scale, getattr(text, "final_logit_softcapping", None)
