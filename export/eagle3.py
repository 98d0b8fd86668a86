"""An EAGLE-3 drafter as vLLM reads it: its native layout and the ``speculators`` one."""

from typing import Any

from torch import Tensor

from drafters.saved import Saved
from export import layout

# norm_before_residual defaults to False in the native format and to True in the other; both are always written.
SWITCHES = ("norm_before_residual", "fc_norm", "norm_output")


def native(saved: Saved, dtype: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors for ``--speculative-config`` with method eagle3."""
    layers = layout.layer_config(saved, dtype, model_type="llama", num_layers=1)
    config = {"architectures": ["LlamaForCausalLMEagle3"], **layers, **layout.common_config(saved), **switches(saved)}
    return config, layout.tensors(saved, dtype)


def speculators(saved: Saved, dtype: str, *, num_drafts: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of the format that vLLM serves by itself."""
    layers = layout.layer_config(saved, dtype, model_type="llama", num_layers=1)
    config = layout.speculators_config(saved, layers, architecture="Eagle3Speculator", num_drafts=num_drafts)
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in layout.tensors(saved, dtype).items()}
    return {**config, **switches(saved)}, renamed


def switches(saved: Saved) -> dict[str, Any]:
    """The layer variants."""
    return {"norm_before_fc": False} | {name: saved.description.config[name] for name in SWITCHES}


def num_drafts(saved: Saved) -> int:
    """Drafts per target pass to serve with, unless told otherwise: not more than the drafter was trained to run ahead."""
    return min(3, int(saved.description.config["num_steps"]))
