"""What a process that computes on a CPU sets: import this before torch, whose OpenMP reads once how its threads shall wait.

Those of a matrix product would spin while they wait for one another, and where something else runs beside them, spin away the very
time that the thread they wait for needs: a training step beside one busy process took three times as long. Sleeping instead costs
microseconds.
"""

import ctypes
import os
import platform

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> None:
    """Has glibc's malloc keep what is freed, for the next step to find; where the environment says nothing of malloc.

    It would give large tensors back to the system, whose fresh pages, each zeroed when first touched, were a seventh of a DSpark
    step. For a process that does nothing but train: it hardly ever shrinks again.
    """
    said = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in _VARIABLES)
    if platform.libc_ver()[0] != "glibc" or said:
        return
    libc = ctypes.CDLL(None)
    # Older ones take 32 MiB at most. A trim threshold alone would be worse than nothing: any setting ends malloc's own adapting.
    if libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30) or libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20):
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
