"""A DFlash drafter as vLLM reads it: its native layout and the ``speculators`` one.

The output at a query's position is the draft for that position: nothing is sampled from the anchor's.
"""

from typing import Any

from torch import Tensor

from drafters.saved import Saved
from export import layout
from recipes.load import RecipeError


def native(saved: Saved, dtype: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors for ``--speculative-config`` with method dflash."""
    backbone = saved.description.config
    # vLLM would take the causality of a sliding window from elsewhere, were it not said here.
    inner: dict[str, Any] = {"mask_token_id": backbone["mask_token_id"], "causal": backbone["causal"], "sample_from_anchor": False}
    if backbone["sliding_window"] is not None:
        inner |= {"use_swa": True, "swa_window_size": backbone["sliding_window"]}
    config = {
        "architectures": ["DFlashDraftModel"],
        **layers(saved, dtype),
        **layout.common_config(saved),
        "is_causal": backbone["causal"],
        "block_size": backbone["block_size"],
        "dflash_config": {**inner, "target_layer_ids": target_layer_ids(saved)},
    }
    return config, layout.tensors(saved, dtype)


def speculators(saved: Saved, dtype: str, *, num_drafts: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of the format that vLLM serves by itself."""
    backbone = saved.description.config
    if backbone["sliding_window"] is not None:
        raise RecipeError("vLLM 0.32 reads no sliding_window from the speculators format; use --format native")
    config = layout.speculators_config(saved, layers(saved, dtype), architecture="DFlashSpeculator", num_drafts=num_drafts)
    config |= {
        "mask_token_id": backbone["mask_token_id"],
        "aux_hidden_state_layer_ids": list(saved.description.aux_layers),
        "block_size": backbone["block_size"],
        "sample_from_anchor": False,
        # The format's name for causality, whatever the window.
        "sliding_window_non_causal": not backbone["causal"],
    }
    return config, layout.tensors(saved, dtype)


def layers(saved: Saved, dtype: str) -> dict[str, Any]:
    """The backbone's layers, as Qwen3's."""
    return layout.layer_config(saved, dtype, model_type="qwen3", num_layers=saved.description.config["num_layers"])


def target_layer_ids(saved: Saved) -> list[int]:
    """The taps as these methods' own checkpoints count them: i is the state after layer index i, which is our i + 1.

    vLLM 0.32 reads eagle_aux_hidden_state_layer_ids first; other readers know only these, and nothing before the first layer.
    """
    if 0 in saved.description.aux_layers:
        raise RecipeError("aux_layers has 0, the embeddings, which this format cannot name; train with ids from 1 on")
    return [layer - 1 for layer in saved.description.aux_layers]


def num_drafts(saved: Saved) -> int:
    """Drafts per target pass to serve with, unless told otherwise: what a block was trained to hold."""
    return int(saved.description.config["block_size"]) - 1
