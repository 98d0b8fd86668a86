"""What a process that computes on a CPU sets, in processes of their own."""

import os
import platform
import subprocess
import sys

import pytest

from recipes.load import ROOT

# Fresh pages, of 4 KiB or more, that the second of two equal pieces of 64 MiB takes, the first freed before it.
ALLOCATE = """
import resource
from recipes.cpu import keep_freed_memory
keep_freed_memory()
faults = []
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    piece = bytearray(b"x") * (64 << 20)
    del piece
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
@pytest.mark.parametrize(("tunables", "kept"), [("", True), ("glibc.malloc.check=0", False)])
def test_freed_memory_is_kept_where_nothing_else_is_said(tunables: str, kept: bool) -> None:
    environment = {**os.environ, "GLIBC_TUNABLES": tunables}
    found = subprocess.run([sys.executable, "-c", ALLOCATE], env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (int(found.stdout) < 10) == kept, found
