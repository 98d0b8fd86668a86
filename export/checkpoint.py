"""Writes the folder vLLM loads from a run's best checkpoint.

    python export/checkpoint.py runs/smollm2_cpu-eagle3

Leaves runs/<name>/export/: config.json, model.safetensors, speculative_config.json (native format only), README.md. With
--format speculators, `vllm serve <that folder>` alone serves target and drafter.
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.saved import read_saved
from export import dflash, dspark, eagle3
from export.card import model_card
from recipes.load import RecipeError, count, run_script

METHODS = {"dflash": dflash, "dspark": dspark, "eagle3": eagle3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder, for example runs/smollm2_cpu-eagle3")
    parser.add_argument("--format", choices=("native", "speculators"), default="native")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; default: the target's")
    parser.add_argument("--num-speculative-tokens", type=count, help="drafts per target pass; default: what suits the method")
    parser.add_argument("--output", type=Path, help="folder to write; default: <run>/export, or <run>/export-speculators")
    arguments = parser.parse_args()
    saved = read_saved(arguments.run)
    method = METHODS[saved.description.method]
    dtype = arguments.dtype or saved.description.target_dtype
    num_drafts = arguments.num_speculative_tokens or method.num_drafts(saved)
    native = arguments.format == "native"
    output = arguments.output or arguments.run / ("export" if native else "export-speculators")

    config, tensors = method.native(saved, dtype) if native else method.speculators(saved, dtype, num_drafts=num_drafts)
    made_from = {
        "run": str(arguments.run.resolve()),
        "step": saved.step,
        "content": digest(config, tensors),
        "format": arguments.format,
        "dtype": dtype,
        "num_drafts": num_drafts,
    }
    if up_to_date(output, made_from):
        print(f"{output} is up to date (step {saved.step})")
    else:
        texts = {"config.json": json.dumps(config, indent=1), "README.md": model_card(saved, num_drafts=num_drafts)}
        if native:
            speculative = {
                "method": saved.description.method,
                "model": str(output.resolve()),
                "num_speculative_tokens": num_drafts,
            }
            texts["speculative_config.json"] = json.dumps(speculative)
        # vLLM reads a mask embedding from a file of its own.
        own = tensors.pop("mask_embedding", None)
        mask = None if own is None else {"embedding": own, "mask_token_id": saved.description.config["mask_token_id"]}
        write_export(output, {**texts, "export.json": json.dumps(made_from, indent=1)}, tensors, mask)
        print(f"{output}: step {saved.step}, validated acceptance length {saved.acceptance_length:.3f}, {dtype}")
    if native:
        print(f'serve: vllm serve {saved.description.served_as} --speculative-config "$(cat {output}/speculative_config.json)"')
        print(f"next: python eval/speedup.py {output}")
    else:
        print(f"serve: vllm serve {output}")


def up_to_date(output: Path, made_from: dict[str, Any]) -> bool:
    """Whether ``output`` was made from just this; RecipeError when something else than an export is there."""
    if not output.exists():
        return False
    marker = output / "export.json"
    if not marker.is_file():
        raise RecipeError(f"{output} exists and is not an export of ours; give --output another folder")
    return bool(json.loads(marker.read_text()) == made_from)


def digest(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """A short digest of config.json and the named tensors."""
    found = hashlib.sha256(json.dumps(config).encode())
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def write_export(output: Path, texts: dict[str, str], tensors: dict[str, Tensor], mask: dict[str, Any] | None) -> None:
    """Writes the folder aside, reads it back, compares bit for bit, and only then puts it in place. mask: mask_embedding.pt."""
    aside = output.with_name(f".{output.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        for name, text in texts.items():
            (aside / name).write_text(text, encoding="utf-8")
        save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
        # safetensors writes for the owner alone; a server may run as someone else.
        (aside / "model.safetensors").chmod((aside / "config.json").stat().st_mode)
        if mask is not None:
            torch.save(mask, aside / "mask_embedding.pt")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise RecipeError(f"{output} could not be written: {error}") from None
    back = load_file(aside / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())
    if output.exists():
        shutil.rmtree(output)
    aside.rename(output)


if __name__ == "__main__":
    run_script(main)
