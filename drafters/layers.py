"""Building blocks of the drafters: the shape of one, RMSNorm, gated MLP, rotary positions.

Parameter names are those that vLLM's Llama and Qwen3 drafters load.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@dataclass(frozen=True)
class DrafterShape:
    """Sizes a drafter shares with its target; all that is needed, with the method's own config, to rebuild one.

    rope_parameters are transformers' (rope_type, rope_theta, scaling factors); eps is that of every RMSNorm.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]

    @classmethod
    def of(cls, target: PreTrainedConfig) -> "DrafterShape":
        """The shape of a drafter for a target with this config."""
        text = target.get_text_config()
        return cls(
            hidden_size=text.hidden_size,
            intermediate_size=text.intermediate_size,
            num_heads=text.num_attention_heads,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            vocab_size=text.vocab_size,
            num_target_layers=text.num_hidden_layers,
            max_position_embeddings=text.max_position_embeddings,
            rms_norm_eps=text.rms_norm_eps,
            rope_parameters=dict(text.rope_parameters),
        )


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), no bias. recompute: what is inside is not kept for the backward but computed again."""

    recompute = False

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            again: Tensor = checkpoint(self._forward, x, use_reentrant=False)
            return again
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return hidden


class Rotary(nn.Module):
    """Rotary position embedding, with whatever scaling the target's rope_parameters name (llama3, yarn, linear ...)."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_position_embeddings,
            rope_parameters=shape.rope_parameters,
        )
        self.table = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates x [..., heads, head_dim] by positions [...] (int64); halves are paired as transformers pairs them."""
        flat = positions.reshape(1, -1)
        cos, sin = self.table(x.float(), flat)
        cos = cos.view(*positions.shape, 1, x.shape[-1])
        sin = sin.view(*positions.shape, 1, x.shape[-1])
        first, second = x.float().chunk(2, dim=-1)
        rotated: Tensor = x.float() * cos + torch.cat((-second, first), dim=-1) * sin
        return rotated.to(x.dtype)


class Attention(nn.Module):
    """The projections of grouped-query attention, with rotated queries and keys; what attends to what is the caller's."""

    def __init__(self, input_size: int, shape: DrafterShape, *, qk_norm: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.q_proj = nn.Linear(input_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        # Qwen3's: queries and keys are normed per head before they are rotated.
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if qk_norm else nn.Identity()
        self.rotary = Rotary(shape)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [..., N, C] of x [..., input_size] at positions [...] (int64)."""
        split = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        rotated: Tensor = self.rotary(self.q_norm(split), positions)
        return rotated

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, both [..., G, C]."""
        split = (self.num_kv_heads, self.head_dim)
        key = self.k_norm(self.k_proj(x).unflatten(-1, split))
        return self.rotary(key, positions), self.v_proj(x).unflatten(-1, split)

    def output(self, attended: Tensor) -> Tensor:
        """The attention's result [..., H] from what each head read, [..., N, C]."""
        projected: Tensor = self.o_proj(attended.flatten(-2))
        return projected
