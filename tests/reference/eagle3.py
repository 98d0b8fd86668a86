"""EAGLE-3's training-time test as loops, from arXiv 2503.01840 section 3 and the layout of design section 6: one document, one
slot, one step, one head at a time. Shares no code with drafters/; takes weights by their names in a checkpoint.
"""

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one head vector: pairs (i, i + half) turn by position * theta^(-2i / size)."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


class Reference:
    """One EAGLE-3 drafter in fp64. shape needs num_heads, num_kv_heads, head_dim, rms_norm_eps and rope_parameters."""

    def __init__(self, weights: dict[str, Tensor], shape, embedding_VH: Tensor, *, norm_before_residual: bool, norm_output: bool):
        self.w = {name: tensor.double() for name, tensor in weights.items()}
        self.shape, self.embedding = shape, embedding_VH.double()
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.w[name + ".weight"], self.shape.rms_norm_eps)

    def heads(self, x: Tensor, name: str, count: int) -> list[Tensor]:
        flat = self.w[f"midlayer.self_attn.{name}_proj.weight"] @ x
        return [flat[i * self.shape.head_dim : (i + 1) * self.shape.head_dim] for i in range(count)]

    def fuse(self, aux_AD: Tensor) -> Tensor:
        parts = [aux_AD[i].double() for i in range(len(aux_AD))]
        if "fc_norm.0.weight" in self.w:
            parts = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        return self.w["fc.weight"] @ torch.cat(parts)

    def read(self, token: int, hidden: Tensor, position: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
        """(queries, keys, values, residual) of one slot at one step."""
        theta = self.shape.rope_parameters["rope_theta"]
        normed = self.norm(hidden, "midlayer.hidden_norm")
        x = torch.cat([self.norm(self.embedding[token], "midlayer.input_layernorm"), normed])
        queries = [rotate(q, position, theta) for q in self.heads(x, "q", self.shape.num_heads)]
        keys = [rotate(k, position, theta) for k in self.heads(x, "k", self.shape.num_kv_heads)]
        return queries, keys, self.heads(x, "v", self.shape.num_kv_heads), normed if self.norm_before_residual else hidden

    def attend(self, queries: list[Tensor], keys: list[list[Tensor]], values: list[list[Tensor]]) -> Tensor:
        """keys and values: one list of heads per visible position."""
        group = self.shape.num_heads // self.shape.num_kv_heads
        read = []
        for n, query in enumerate(queries):
            scores = torch.stack([query @ key[n // group] for key in keys]) / math.sqrt(self.shape.head_dim)
            weights = torch.softmax(scores, 0)
            read.append(sum(weight * value[n // group] for weight, value in zip(weights, values, strict=True)))
        return torch.cat(read)

    def finish(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(what is fed back, what lm_head reads)."""
        hidden = residual + self.w["midlayer.self_attn.o_proj.weight"] @ attended
        x = self.norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = self.w["midlayer.mlp.gate_proj.weight"] @ x, self.w["midlayer.mlp.up_proj.weight"] @ x
        hidden = hidden + self.w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
        normed = self.norm(hidden, "norm")
        return (normed if self.norm_output else hidden), normed

    def logits(self, tokens: list[int], aux_TAD: Tensor, slot: int, num_steps: int) -> list[Tensor]:
        """Draft logits [W] of steps 0..num_steps-1 at one slot, the true tokens embedded. tokens must reach that far."""
        fused = [self.fuse(aux_TAD[t]) for t in range(slot + 1)]
        seen = [self.read(tokens[t + 1], fused[t], t) for t in range(slot + 1)]
        keys, values = [s[1] for s in seen], [s[2] for s in seen]
        queries, _, _, residual = seen[slot]
        out = []
        for k in range(num_steps):
            fed_back, normed = self.finish(self.attend(queries, keys, values), residual)
            out.append(self.w["lm_head.weight"] @ normed)
            if k + 1 < num_steps:
                queries, key, value, residual = self.read(tokens[slot + 2 + k], fed_back, slot + k + 1)
                keys.append(key)
                values.append(value)
        return out


def loss(
    reference: Reference,
    documents: list[dict],
    teacher_VD: Tensor,
    kept: list[int],
    *,
    num_steps: int,
    step_decay: float,
) -> tuple[float, float]:
    """(weighted KL sum, weight) over documents, each a dict of tokens (list), mask (list), aux_TAD and last_TD.

    A step of a slot counts when the slot's newest known token and every token up to the predicted one are the target's own,
    and the target's most likely token is in the draft vocabulary.
    """
    total = weight = 0.0
    for document in documents:
        tokens, mask = document["tokens"], document["mask"]
        for slot in range(len(tokens)):
            for k in range(num_steps):
                label_at = slot + 2 + k
                if label_at >= len(tokens) or not all(mask[slot + 1 : label_at + 1]):
                    continue
                full = teacher_VD.double() @ document["last_TD"][label_at - 1].double()
                if int(full.argmax()) not in kept:
                    continue
                p = torch.softmax(full[kept], 0)
                q = torch.softmax(reference.logits(tokens, document["aux_TAD"], slot, k + 1)[k], 0)
                total += step_decay**k * float((p * (p / q).log()).sum())
                weight += step_decay**k
    return total, weight
