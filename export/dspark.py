"""A DSpark drafter as vLLM reads it: its native layout and the ``speculators`` one.

Drafting starts at the anchor's own output (sample_from_anchor), which is the draft for the next position.
"""

import sys
from typing import Any

from torch import Tensor

from drafters.calibration import Scaling
from drafters.saved import Saved
from export import layout
from export.dflash import layers, target_layer_ids
from recipes.load import RecipeError


def native(saved: Saved, dtype: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors for ``--speculative-config`` with method dspark."""
    config = {
        "architectures": ["Qwen3DSparkModel"],
        **layers(saved, dtype),
        **layout.common_config(saved),
        **heads(saved),
        "is_causal": saved.description.config["causal"],
        "target_layer_ids": target_layer_ids(saved),
    }
    return config, tensors(saved, dtype)


def speculators(saved: Saved, dtype: str, *, num_drafts: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of the format that vLLM serves by itself."""
    if saved.description.config["causal"]:
        raise RecipeError("vLLM 0.32 is not known to read a causal switch from dspark's speculators format; use --format native")
    config = layout.speculators_config(saved, layers(saved, dtype), architecture="Qwen3DSparkModel", num_drafts=num_drafts)
    config |= {**heads(saved), "aux_hidden_state_layer_ids": list(saved.description.aux_layers), "use_aux_hidden_state": True}
    return config, tensors(saved, dtype)


def tensors(saved: Saved, dtype: str) -> dict[str, Tensor]:
    """The trained weights; in those of the confidence head, its scaling: vLLM knows of none."""
    if not saved.calibration:
        print("the confidence is not calibrated: start the training again, which ends with that", file=sys.stderr)
    scaling = Scaling(**saved.calibration.get("of_all", {}))
    scaled = {name: weight / scaling.temperature for name, weight in saved.weights.items() if name.startswith("confidence_head.")}
    scaled["confidence_head.proj.bias"] = scaled["confidence_head.proj.bias"] + scaling.shift
    return layout.tensors(saved._replace(weights=saved.weights | scaled), dtype)


def heads(saved: Saved) -> dict[str, Any]:
    """What both formats say of the block and of the two heads."""
    settings = saved.description.config
    if settings["sliding_window"] is not None:
        raise RecipeError("vLLM 0.32 serves dspark without sliding windows only; train with sliding_window: null, or serve dflash")
    return {
        "mask_token_id": settings["mask_token_id"],
        "block_size": settings["block_size"],
        "sample_from_anchor": True,
        "markov_rank": settings["markov_rank"],
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        # Applied behind the head, whose weights hold the scaling of all drafts, these, one for each draft of a block, fit closer;
        # vLLM 0.32 does not read them.
        "confidence_scalings": saved.calibration.get("of_each"),
    }


def num_drafts(saved: Saved) -> int:
    """Drafts per target pass to serve with, unless told otherwise: a block's."""
    return int(saved.description.config["block_size"])
