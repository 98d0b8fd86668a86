"""What the exported folders of all methods have in common. Checked against vLLM 0.32."""

from typing import Any

import torch
from torch import Tensor

from drafters.saved import Saved


def layer_config(saved: Saved, dtype: str, *, model_type: str, num_layers: int) -> dict[str, Any]:
    """The drafter's decoder layers as a transformers config of ``model_type`` (llama, qwen3)."""
    shape = saved.description.shape
    return {
        "model_type": model_type,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        # Older readers know the flat key only, newer ones the nested one.
        "rope_theta": shape.rope_parameters.get("rope_theta", 10000.0),
        "rope_parameters": shape.rope_parameters,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        # A count other than 3 that is not written here aborts vLLM without a word.
        "num_aux_hidden_states": len(saved.description.aux_layers),
    }


def common_config(saved: Saved) -> dict[str, Any]:
    """What every format says beyond the layers: vocabulary, width and taps. vLLM's aux id k is ours."""
    return {
        "draft_vocab_size": len(saved.kept_W),
        "target_hidden_size": saved.description.shape.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(saved.description.aux_layers),
    }


def speculators_config(saved: Saved, layers: dict[str, Any], *, architecture: str, num_drafts: int) -> dict[str, Any]:
    """config.json with which ``vllm serve <this folder>`` alone finds target and drafter; the method adds its own keys."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_drafts, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    method = saved.description.method
    return {
        "architectures": [architecture],
        "speculators_model_type": method,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": saved.description.served_as, "architectures": []},
        },
        "transformer_layer_config": layers,
        "tie_word_embeddings": False,
        "dtype": layers["dtype"],
        **common_config(saved),
    }


def tensors(saved: Saved, dtype: str) -> dict[str, Tensor]:
    """The trained weights by their own names, and the vocabulary's maps where it is smaller than the target's.

    d2t holds offsets: draft token i is target token i + d2t[i].
    """
    cast = {name: weight.to(getattr(torch, dtype)).contiguous() for name, weight in saved.weights.items()}
    vocab_size = saved.description.shape.vocab_size
    if len(saved.kept_W) < vocab_size:
        cast["d2t"] = saved.kept_W - torch.arange(len(saved.kept_W))
        cast["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, saved.kept_W, True)
    return cast
