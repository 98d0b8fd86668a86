"""Quantised targets: their features are those of the weights as they are dequantised by hand; plans count the bytes they take."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from data.batch import Document
from data.target import TargetConfig
from data.target_model import load_target, target_model_config
from data.teacher import OnlineTeacher
from data.vllm_features import load_outer
from recipes.load import RecipeError
from train.plan import bytes_of_quantised

GROUP = 32
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        }
    },
}
Quantised = tuple[dict[str, Tensor], Tensor]
"""Tensors of the checkpoint, by what is put behind the layer's name; and the weight that they stand for."""


def fp8(weight: Tensor) -> Quantised:
    """One scale for each block of 128 x 128; this weight is within one block of columns."""
    rows, whole, scales, found = weight.split(128), torch.zeros_like(weight, dtype=torch.float8_e4m3fn), [], []
    for i, block in enumerate(rows):
        assert block.shape[1] <= 128
        scale = block.abs().max() / 448
        whole[i * 128 : i * 128 + len(block)] = (block / scale).to(torch.float8_e4m3fn)
        scales.append(scale.view(1, 1))
        found.append((block / scale).to(torch.float8_e4m3fn).float() * scale)
    return {"weight": whole, "weight_scale_inv": torch.cat(scales)}, torch.cat(found)


def compressed(weight: Tensor) -> Quantised:
    """One scale for each row."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    rounded = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": rounded, "weight_scale": scale}, rounded.float() * scale


def pack(numbers: Tensor, dim: int) -> Tensor:
    """Eight numbers of 4 bits in each int32, the first in the lowest bits."""
    moved = numbers.long().movedim(dim, 0).unflatten(0, (-1, 8))
    packed = sum(moved[:, i] << (4 * i) for i in range(8))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().movedim(0, dim).contiguous()


def gptq(weight: Tensor) -> Quantised:
    """Numbers -8 .. 7 and one scale for each group of GROUP inputs, the zero point 8 stored as 7."""
    outputs, inputs = weight.shape
    groups = weight.T.reshape(-1, GROUP, outputs)
    scale = (groups.abs().amax(1) / 7).half()
    numbers = (groups / scale.float()[:, None]).round().clamp(-8, 7)
    tensors = {
        "qweight": pack(numbers.reshape(inputs, outputs) + 8, 0),
        "qzeros": pack(torch.full((len(groups), outputs), 7), 1),
        "scales": scale,
        "g_idx": (torch.arange(inputs) // GROUP).int(),
    }
    return tensors, (numbers * scale.float()[:, None]).reshape(inputs, outputs).T.contiguous()


def awq(weight: Tensor) -> Quantised:
    """Numbers 0 .. 15, a scale and a zero point for each group, eight neighbours packed in the order 0 2 4 6 1 3 5 7."""
    outputs, inputs = weight.shape
    groups = weight.T.reshape(-1, GROUP, outputs)
    low, high = groups.amin(1), groups.amax(1)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(0, 15)
    numbers = ((groups / scale.float()[:, None]).round() + zero[:, None]).clamp(0, 15)

    def in_order(x: Tensor) -> Tensor:
        return pack(x.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 1)

    tensors = {"qweight": in_order(numbers.reshape(inputs, outputs)), "qzeros": in_order(zero), "scales": scale}
    return tensors, ((numbers - zero[:, None]) * scale.float()[:, None]).reshape(inputs, outputs).T.contiguous()


def quantise(plain: Path, out: Path, how: Callable[[Tensor], Quantised], config: dict[str, Any]) -> dict[str, Tensor]:
    """Writes the target in ``plain`` quantised to ``out``; the weights that it then stands for."""
    weights, tensors = load_file(plain / "model.safetensors"), {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            found, weights[name] = how(weight)
            tensors |= {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in found.items()}
        else:
            tensors[name] = weight
    shutil.copytree(plain, out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**written, "quantization_config": config}))
    return weights


NO_KERNELS = pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is None, reason="gptqmodel is not installed")


@pytest.mark.parametrize(
    ("how", "config", "tolerance"),
    [
        (fp8, FP8, 1e-5),
        (compressed, COMPRESSED, 1e-5),
        # The kernels that run packed weights of four bits on a CPU multiply in half precision.
        pytest.param(gptq, GPTQ, 0.02, marks=NO_KERNELS),
        pytest.param(awq, AWQ, 0.02, marks=NO_KERNELS),
    ],
)
def test_features_are_those_of_the_dequantised_weights(
    how: Callable[[Tensor], Quantised], config: dict[str, Any], tolerance: float, tiny_target: Path, tmp_path: Path
) -> None:
    weights = quantise(tiny_target, tmp_path / "target", how, config)
    settings = TargetConfig(str(tmp_path / "target"), dtype="float32" if tolerance < 1e-3 else "float16")
    plain = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    plain.load_state_dict(weights)
    document = Document("a", torch.arange(3, 23), torch.arange(20) > 7)
    layers = (1, 4, 8)
    quantised = OnlineTeacher(load_target(tmp_path / "target", settings, torch.device("cpu")), layers)
    expected = OnlineTeacher(plain, layers)
    assert quantised.work_per_token == expected.work_per_token
    (found,), (wanted,) = quantised.features([document]), expected.features([document])
    for one, other in zip(found[:2], wanted[:2], strict=True):
        assert one.dtype == getattr(torch, settings.dtype)
        assert float((one.float() - other).norm() / other.norm()) < tolerance


def test_what_transformers_cannot_run_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    """With one line that says what can; also a method that it would pass over with a warning, weights without their scales, and
    weights that are not there."""

    def refused(name: str, how: Callable[[Tensor], Quantised], config: dict[str, Any]) -> str:
        quantise(tiny_target, tmp_path / name, how, config)
        if not config:
            (tmp_path / name / "config.json").write_text((tiny_target / "config.json").read_text())
        with pytest.raises(RecipeError) as error:
            load_target(tmp_path / name, TargetConfig("x", dtype="float32"), torch.device("cpu"))
        return str(error.value)

    if importlib.util.find_spec("gptqmodel") is None:
        for name, how, config in (("gptq", gptq, GPTQ), ("awq", awq, AWQ)):
            said = refused(name, how, config)
            assert f"is quantised ({name}), which transformers cannot run here: " in said
            assert "install what it asks for, or have vLLM run it: python data/capture.py <recipe> --engine vllm" in said
    for name, config in (("modelopt", {"quant_method": "modelopt"}), ("quantization_config names no quant_method", {"bits": 4})):
        assert f"is quantised by a method that transformers does not know ({name}); have vLLM" in refused(name[:8], fp8, config)
    said = refused("no-scales", lambda weight: ({"weight": weight.to(torch.float8_e4m3fn)}, weight), FP8)
    assert "_proj.weight in eight bits, but not its scale; give a whole checkpoint" in said
    said = refused("other-shape", lambda weight: ({"weight": weight[:8]}, weight), {})
    assert "is damaged, or not what its config.json says: " in said
    assert "has model.layers.0.mlp.down_proj.weight_scale_inv, which nothing reads" in refused("bare", fp8, {})
    assert "lacks model.layers.0.mlp.down_proj.weight; give a whole checkpoint" in refused(
        "none", lambda _: ({}, torch.empty(0)), {}
    )


def test_a_download_that_broke_off(tiny_target: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_target, tmp_path / "target")
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(RecipeError, match=r"is damaged, or not what its config\.json says: "):
        load_target(tmp_path / "target", TargetConfig("x", dtype="float32"), torch.device("cpu"))


def test_capture_needs_nothing_quantised(tiny_target: Path, tmp_path: Path) -> None:
    """vLLM runs the layers; embedding, last norm and head are read, whatever transformers lacks for the layers."""
    quantise(tiny_target, tmp_path / "target", gptq, GPTQ)
    outer, plain = load_outer(tmp_path / "target", torch.float32, "cpu"), load_file(tiny_target / "model.safetensors")
    assert {name for name, _ in outer.named_parameters()} == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for name, parameter in outer.named_parameters():
        assert torch.equal(parameter, plain[name])


def test_bytes_of_a_weight_by_hand(tiny_target: Path, tmp_path: Path) -> None:
    """Four bits, and for each 32 of them a scale of 16 bits and a zero point of 4: 4.625 bits. fp8 is one byte where there are
    kernels for it, else unpacked, as compressed-tensors are."""
    for name, config, expected in (("g", GPTQ, 4.625 / 8), ("a", AWQ, 4.625 / 8), ("f", FP8, 1.0), ("c", COMPRESSED, None)):
        quantise(tiny_target, tmp_path / name, lambda weight: ({"weight": weight}, weight), config)
        assert bytes_of_quantised(target_model_config(tmp_path / name), "cuda") == expected
    assert bytes_of_quantised(target_model_config(tmp_path / "f"), "cpu") is None
    assert bytes_of_quantised(target_model_config(tiny_target), "cuda") is None
