"""An EAGLE-3 drafter as vLLM reads it: its native layout and the ``speculators`` one.

Checked against vLLM 0.32. Layer ids are ours already: vLLM's aux id k is the state after k decoder layers. d2t holds offsets:
draft token i is target token i + d2t[i].
"""

from typing import Any

import torch
from torch import Tensor

from drafters.saved import Saved

# norm_before_residual defaults to False in the native format and to True in the other; both are always written.
SWITCHES = ("norm_before_residual", "fc_norm", "norm_output")


def layer_config(saved: Saved, dtype: str) -> dict[str, Any]:
    """The drafter's decoder layer as a transformers Llama config."""
    shape = saved.description.shape
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
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


def eagle_config(saved: Saved) -> dict[str, Any]:
    """What both formats say of the drafter beyond its layer."""
    switches = {name: saved.description.config[name] for name in SWITCHES}
    return {
        **switches,
        "norm_before_fc": False,
        "draft_vocab_size": len(saved.kept_W),
        "target_hidden_size": saved.description.shape.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(saved.description.aux_layers),
    }


def native_config(saved: Saved, dtype: str) -> dict[str, Any]:
    """config.json for ``--speculative-config`` with method eagle3."""
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer_config(saved, dtype), **eagle_config(saved)}


def speculators_config(saved: Saved, dtype: str, *, num_drafts: int) -> dict[str, Any]:
    """config.json with which ``vllm serve <this folder>`` alone finds target and drafter."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_drafts, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": saved.description.served_as, "architectures": []},
        },
        "transformer_layer_config": layer_config(saved, dtype),
        "tie_word_embeddings": False,
        "dtype": dtype,
        **eagle_config(saved),
    }


def tensors(saved: Saved, dtype: str, *, layer_prefix: str) -> dict[str, Tensor]:
    """model.safetensors: the trained weights, and the vocabulary's maps where it is smaller than the target's."""
    cast = {
        name.replace("midlayer.", layer_prefix): weight.to(getattr(torch, dtype)).contiguous()
        for name, weight in saved.weights.items()
    }
    vocab_size = saved.description.shape.vocab_size
    if len(saved.kept_W) < vocab_size:
        cast["d2t"] = saved.kept_W - torch.arange(len(saved.kept_W))
        cast["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, saved.kept_W, True)
    return cast


def drafts_trained_for(saved: Saved) -> int:
    """Steps the drafter was trained to run ahead."""
    return int(saved.description.config["num_steps"])
