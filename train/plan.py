"""What a run would need, from shapes alone: parameters, memory per device, floating-point work. Nothing is loaded."""

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from data.target import TargetConfig, resolve_target
from data.teacher import aux_layer_ids
from recipes.load import locate
from train.loop import TrainConfig

GIB = 2**30


def planned_target(target: TargetConfig) -> PreTrainedConfig:
    """The target's config: from the folder the recipe keeps for planning, else from the target itself."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(locate(target.config) if target.config else resolve_target(target))
    return config


def plan(drafter: nn.Module, config: PreTrainedConfig, target: TargetConfig, train: TrainConfig, *, passes: int) -> str:
    """A table of what training ``drafter`` (on the meta device) takes per device, one copy of target and drafter each.

    ``passes``: how often a token goes through the drafter in one training step.
    """
    text = config.get_text_config()
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    target_parameters = sum(parameter.numel() for parameter in model.parameters())
    drafter_parameters = sum(parameter.numel() for parameter in drafter.parameters())
    bytes_each = getattr(torch, target.dtype).itemsize
    tokens = train.rows_per_device * train.row_tokens
    num_states = len(aux_layer_ids(target, config)) + 1
    parts = {
        f"target, {target.dtype}": target_parameters * bytes_each,
        "drafter: weights, gradients, two moments, fp32": drafter_parameters * 16,
        f"features of one forward ({tokens} tokens)": tokens * num_states * text.hidden_size * bytes_each,
        "features kept across epochs (train.feature_cache_gib)": int(train.feature_cache_gib * GIB),
        f"attention scores of {passes} steps, dense, fp32": passes * text.num_attention_heads * tokens * train.row_tokens * 4,
    }
    lines = [f"{'target parameters':55} {target_parameters / 1e9:9.3f} billion"]
    lines += [f"{'drafter parameters':55} {drafter_parameters / 1e9:9.3f} billion"]
    lines += [f"{name:55} {size / GIB:9.2f} GiB" for name, size in parts.items()]
    lines += [f"{'sum per device':55} {sum(parts.values()) / GIB:9.2f} GiB"]
    work = 2 * target_parameters + 6 * passes * drafter_parameters
    lines += [f"{'work per token: target forward + drafter':55} {work / 1e9:9.2f} GFLOP"]
    store = 1_000_000 * num_states * text.hidden_size * bytes_each
    lines += [f"{'features on disk, if stored':55} {store / GIB:9.2f} GiB per million tokens"]
    return "\n".join(lines)
