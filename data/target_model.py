"""The frozen target as a transformers model: read, quantised or not, whole or in parts; and its sizes, without reading it."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from data.sharded import load_sharded
from data.target import TargetConfig
from recipes.load import RecipeError

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configs call the number of experts in a layer."""


def load_target(folder: Path, target: TargetConfig, device: torch.device) -> PreTrainedModel:
    """The target in the recipe's dtype on ``device``, frozen, in eval mode; a part of it where it is to be sharded and processes
    train together. A quantised one as transformers runs it: its states are in the recipe's dtype all the same."""
    dtype = getattr(torch, target.dtype)
    config = target_model_config(folder)
    quantised = quantisation(config)
    if is_sharded(target):
        if quantised is not None:
            raise RecipeError(
                f"target {folder} is quantised ({quantised['quant_method']}), and cannot be sharded; give its bf16 checkpoint, "
                "target.sharded=false, or features that vLLM made: python data/capture.py <recipe> --engine vllm"
            )
        return load_sharded(folder, dtype, device)
    # Weights are read straight to the device: eight processes with a 70B copy each in host memory would need 1.1 TB.
    settings: dict[str, Any] = {"dtype": dtype, "device_map": {"": device}}
    model = read_model(folder, settings) if quantised is None else _read_quantised(folder, config, quantised, settings)
    model.requires_grad_(False).eval()
    return model


def read_model(folder: Path, settings: dict[str, Any]) -> PreTrainedModel:
    """from_pretrained(); RecipeError for weights that the checkpoint lacks, which would be random, or whose scales nobody read."""
    try:
        both: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **settings)
    except (SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "mismatched" not in str(error):
            raise
        raise RecipeError(
            f"target {folder} is damaged, or not what its config.json says: {' '.join(str(error).split())[:300]}"
        ) from None
    model, loaded = both
    read, packed = model.state_dict().keys(), re.compile(r"(.*)\.(weight_scale\w*|weight_packed|scales|qweight|qzeros)")
    found = [match for name in sorted(loaded["unexpected_keys"]) if (match := packed.fullmatch(name))]
    unread = [match[0] for match in found if f"{match[1]}.weight" in read]
    if loaded["missing_keys"] or unread:
        what = f"has {unread[0]}, which nothing reads" if unread else f"lacks {min(loaded['missing_keys'])}"
        raise RecipeError(f"target {folder} {what}; give a whole checkpoint, of a kind that transformers can load")
    whole: PreTrainedModel = model
    return whole


def _read_quantised(folder: Path, config: PreTrainedConfig, how: dict[str, Any], settings: dict[str, Any]) -> PreTrainedModel:
    """read_model() of a quantised target; RecipeError where it would not run here."""
    method = how["quant_method"]
    by_vllm = "have vLLM run it: python data/capture.py <recipe> --engine vllm, then train.features=<its store>"
    if method not in {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}:
        # transformers would only warn, and read packed weights as numbers.
        raise RecipeError(f"target {folder} is quantised by a method that transformers does not know ({method}); {by_vllm}")
    if method == "compressed-tensors":
        # Else they are unpacked when the whole model first runs, which it never does here: its head is not run with it.
        how["dequantize"] = True
    _check_scales(folder)
    try:
        model = read_model(folder, {**settings, "config": config})
        with torch.no_grad():  # some packages are missed only now
            model.get_decoder()(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    except (torch.OutOfMemoryError, RecipeError):
        raise
    except (ImportError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(
            f"target {folder} is quantised ({method}), which transformers cannot run here: {reason}; "
            f"install what it asks for, or {by_vllm}"
        ) from None
    return model


def _check_scales(folder: Path) -> None:
    """RecipeError for weights of eight bits without their scales, which transformers would take to be 1."""
    names: dict[str, str] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118  # no mapping
    for name, dtype in names.items():
        if dtype.startswith("F8_E4M3") and name.endswith(".weight") and not {f"{name}_scale", f"{name}_scale_inv"} & names.keys():
            raise RecipeError(f"target {folder} has {name} in eight bits, but not its scale; give a whole checkpoint")


def quantisation(config: PreTrainedConfig) -> dict[str, Any] | None:
    """How a target's weights are quantised: its config's own entry, with quant_method (fp8, compressed-tensors, gptq, awq ...);
    None where they are not."""
    found: dict[str, Any] | None = None
    for holder in (config, config.get_text_config()):
        found = getattr(holder, "quantization_config", None) if found is None else found
    if found is not None:  # older files of bitsandbytes do not say
        older = found.get("load_in_4bit") or found.get("load_in_8bit")
        found.setdefault("quant_method", "bitsandbytes" if older else "quantization_config names no quant_method")
    return found


class TargetSizes(NamedTuple):
    """Parameters of each decoder layer, as they are before quantisation packs them, and of all else. work_per_token: FLOPs of the
    layers' products for one token, without attention's own, as is usual; of experts, only those that a token goes through."""

    layers: list[int]
    outer: int
    work_per_token: float


def target_sizes(config: PreTrainedConfig) -> TargetSizes:
    """The sizes of a target; nothing is loaded."""
    text = config.get_text_config()
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    experts = next((number for name in EXPERTS if (number := getattr(text, name, None))), chosen)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    work, layers = 0.0, []
    for layer in model.get_decoder().layers:
        sizes = {name: parameter.numel() for name, parameter in layer.named_parameters()}
        layers.append(sum(sizes.values()))
        work += sum(2.0 * size * (chosen / experts if ".experts." in name else 1.0) for name, size in sizes.items())
    return TargetSizes(layers, sum(parameter.numel() for parameter in model.parameters()) - sum(layers), work)


def target_model_config(folder: Path) -> PreTrainedConfig:
    """config.json of a target folder."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    return config


def is_sharded(target: TargetConfig) -> bool:
    """Whether processes hold parts of the target, and so have to run it together."""
    return target.sharded and dist.is_initialized() and dist.get_world_size() > 1
