"""DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147) as loops in fp64: one document, anchor, query and head at a time.

Shares no code with drafters/; takes weights by their names in a checkpoint.
"""

import math

import torch
from torch import Tensor

from tests.reference.eagle3 import rms_norm, rotate


class Block:
    """A backbone. shape needs num_heads, num_kv_heads, head_dim, rms_norm_eps and rope_parameters."""

    def __init__(
        self, weights: dict[str, Tensor], shape, embedding_VH: Tensor, *, num_layers: int, mask: int, causal=False, window=None
    ):
        self.w = {name: tensor.double() for name, tensor in weights.items()}
        self.shape, self.embedding, self.num_layers, self.mask = shape, embedding_VH.double(), num_layers, mask
        self.causal, self.window = causal, window

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.w[name + ".weight"], self.shape.rms_norm_eps)

    def heads(self, x: Tensor, layer: int, name: str, count: int, position: int | None) -> list[Tensor]:
        """Heads of a projection; normed and rotated where it has a position (queries and keys)."""
        prefix = f"layers.{layer}.self_attn."
        flat = self.w[f"{prefix}{name}_proj.weight"] @ x
        split = [flat[i * self.shape.head_dim : (i + 1) * self.shape.head_dim] for i in range(count)]
        if position is None:
            return split
        theta = self.shape.rope_parameters["rope_theta"]
        return [rotate(self.norm(head, f"{prefix}{name}_norm"), position, theta) for head in split]

    def visible(self, query: int, key: int, anchor: int) -> bool:
        if self.window is not None and abs(query - key) >= self.window:
            return False
        return key < anchor or not self.causal or key <= query

    def run(self, tokens: list[int], aux_TAD: Tensor, anchor: int, num_queries: int) -> list[Tensor]:
        """What the head reads at each of the block's queries; tokens up to the anchor, features of those before it."""
        shape = self.shape
        context = [self.norm(self.w["fc.weight"] @ aux_TAD[t].double().flatten(), "hidden_norm") for t in range(anchor)]
        states = [self.embedding[tokens[anchor] if s == 0 else self.mask] for s in range(num_queries)]
        for layer in range(self.num_layers):
            normed = [self.norm(x, f"layers.{layer}.input_layernorm") for x in states]
            keys, values = [], []
            for position, x in enumerate(context + normed):
                keys.append(self.heads(x, layer, "k", shape.num_kv_heads, position))
                values.append(self.heads(x, layer, "v", shape.num_kv_heads, None))
            for s in range(num_queries):
                seen = [t for t in range(anchor + num_queries) if self.visible(anchor + s, t, anchor)]
                read = []
                for n, query in enumerate(self.heads(normed[s], layer, "q", shape.num_heads, anchor + s)):
                    g = n // (shape.num_heads // shape.num_kv_heads)
                    scores = torch.stack([query @ keys[t][g] for t in seen]) / math.sqrt(shape.head_dim)
                    weights = torch.softmax(scores, 0)
                    read.append(sum(weight * values[t][g] for weight, t in zip(weights, seen, strict=True)))
                x = states[s] + self.w[f"layers.{layer}.self_attn.o_proj.weight"] @ torch.cat(read)
                y = self.norm(x, f"layers.{layer}.post_attention_layernorm")
                gate, up = (self.w[f"layers.{layer}.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
                states[s] = x + self.w[f"layers.{layer}.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
        return [self.norm(x, "norm") for x in states]


def anchors(document: dict) -> list[int]:
    """Positions whose token and the next one are the target's own."""
    mask = document["mask"]
    return [t for t in range(len(mask) - 1) if mask[t] and mask[t + 1]]


def run_length(mask: list[bool], start: int, most: int) -> int:
    """How many tokens from ``start`` on are the target's own without a gap, at most ``most``."""
    length = 0
    while length < most and start + length < len(mask) and mask[start + length]:
        length += 1
    return length


def dflash_loss(
    block: Block,
    documents: list[dict],
    head_WH: Tensor,
    teacher_WD: Tensor,
    kept: list[int],
    *,
    size: int,
    gamma: float,
    loss: str = "ce",
    dpace_alpha: float | None = None,
    drawn: list[list[int]] | None = None,
) -> tuple[float, float]:
    """(weighted loss sum, weight) with every anchor of every document, or those drawn."""
    total = weight = 0.0
    for document, chosen in zip(documents, drawn or map(anchors, documents), strict=True):
        tokens = document["tokens"]
        for p in chosen:
            hidden = block.run(tokens[: p + 1], document["aux_TAD"], p, size)
            losses, true = {}, []
            for k in range(1, run_length(document["mask"], p + 1, size - 1) + 1):
                q = torch.softmax(head_WH.double() @ hidden[k], 0)
                if tokens[p + k] not in kept:
                    true.append(0.0)
                    continue
                label = kept.index(tokens[p + k])
                true.append(float(q[label]))
                teacher = torch.softmax(teacher_WD.double() @ document["last_TD"][p + k - 1].double(), 0)
                kl, tv = float((teacher * (teacher / q).log()).sum()), 1 - float(torch.minimum(q, teacher).sum())
                lam = math.exp(-3 * (1 - tv))
                values = {"ce": -float(q[label].log()), "kl": kl, "tv": tv, "lk": lam * kl + (1 - lam) * tv}
                losses[k] = values[loss]
            for k, value in losses.items():
                if dpace_alpha is None:
                    w = math.exp(-(k - 1) / gamma)
                    weight += w
                else:
                    smooth = [(1 - dpace_alpha) * q + dpace_alpha for q in true]
                    w = sum(math.prod(smooth[:m]) for m in range(k, len(smooth) + 1))
                    weight += 1
                total += w * value
    return total, weight


def dspark_loss(
    block: Block,
    documents: list[dict],
    head_WH: Tensor,
    teacher_WD: Tensor,
    kept: list[int],
    *,
    size: int,
    gamma: float,
    greedy: bool,
) -> tuple[float, float]:
    """(weighted loss sum, weight) with every anchor of every document; the paper's 0.1, 0.9 and 1.

    greedy: the confidence is the chance that the most likely draft is the text's own token.
    """
    total = weight = 0.0
    w1, w2 = block.w["markov_head.markov_w1.weight"], block.w["markov_head.markov_w2.weight"]
    for document in documents:
        tokens = document["tokens"]
        for p in anchors(document):
            hidden = block.run(tokens[: p + 1], document["aux_TAD"], p, size)
            for k in range(run_length(document["mask"], p + 1, size)):
                if tokens[p + k + 1] not in kept:
                    continue
                markov = w1[tokens[p + k]]
                q = torch.softmax(head_WH.double() @ hidden[k] + w2 @ markov, 0)
                teacher = torch.softmax(teacher_WD.double() @ document["last_TD"][p + k].double(), 0)
                l1 = float((q - teacher).abs().sum())
                accepted = float(torch.minimum(q, teacher).sum())
                if greedy:
                    accepted = float(kept[int(q.argmax())] == tokens[p + k + 1])
                logit = block.w["confidence_head.proj.weight"][0] @ torch.cat([hidden[k], markov])
                c = float(torch.sigmoid(logit + block.w["confidence_head.proj.bias"][0]))
                bce = -accepted * math.log(c) - (1 - accepted) * math.log(1 - c)
                w = math.exp(-k / gamma)
                total += w * (0.1 * float(-q[kept.index(tokens[p + k + 1])].log()) + 0.9 * l1 + bce)
                weight += w
    return total, weight
