"""What a process that computes on a CPU sets, in processes of their own."""

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.cpu import keep_freed_memory
from recipes.load import ROOT

# Fresh pages, of 4 KiB or more, that the second of two equal pieces of 24 MiB takes, the first freed before it.
ALLOCATE = """
import resource
from recipes.cpu import keep_freed_memory
keep_freed_memory()
faults = []
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    piece = bytearray(b"x") * (24 << 20)
    del piece
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
@pytest.mark.parametrize(
    ("said", "kept"),
    [({}, True), ({"GLIBC_TUNABLES": "glibc.malloc.check=0"}, False), ({"MALLOC_MMAP_THRESHOLD_": "131072"}, False)],
    ids=["nothing", "tunables", "variable"],
)
def test_freed_memory_is_kept_where_nothing_else_is_said(said: dict[str, str], kept: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    run = [sys.executable, "-c", ALLOCATE]
    found = subprocess.run(run, env=environment | said, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (int(found.stdout) < 10) == kept, found


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1 << 40, [(-3, 1 << 30), (-1, (1 << 31) - 1)]),
        (32 << 20, [(-3, 1 << 30), (-3, 32 << 20), (-1, (1 << 31) - 1)]),
        (0, [(-3, 1 << 30), (-3, 32 << 20)]),
    ],
    ids=["new", "old", "neither"],
)
def test_an_older_glibc_is_asked_for_less(most: int, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which refuses a large threshold with a 0; the trim threshold alone would end its own adapting, for worse than nothing."""
    calls = []

    class Old:
        def mallopt(self, parameter: int, value: int) -> int:
            calls.append((parameter, value))
            return int(parameter != -3 or value <= most)

    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.34"))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Old())
    for name in ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    keep_freed_memory()
    assert calls == expected


def test_training_on_a_cpu_keeps_freed_memory(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from train import launch
from train.loop import TrainConfig
launch.keep_freed_memory = lambda: print("kept")
launch.make_accelerator(TrainConfig(), Path())
"""
    run, environment = [sys.executable, "-c", code], {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "kept\n"
