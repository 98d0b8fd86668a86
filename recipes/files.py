"""Files that no crash and no full disk can spoil."""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from recipes.load import RecipeError


def write_atomically(path: Path, text: str) -> None:
    """Writes a file aside, syncs it to disk and renames it into place."""
    aside = path.with_name(f".{path.name}.partial")
    with explain_full_disk(path):
        with aside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Turns a write that failed for want of space into a RecipeError; other errors pass."""
    try:
        yield
    except Exception as error:  # torch and safetensors wrap ENOSPC in errors of their own
        number = error.errno if isinstance(error, OSError) else int((re.findall(r"\(os error (\d+)\)", str(error)) or [0])[0])
        full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if full or _free_bytes(path) < 1 << 20:
            raise RecipeError(
                f"the disk of {path.parent} is full; free some space and start again: it goes on at its last checkpoint"
            ) from error
        raise


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(path.parent if path.parent.is_dir() else ".").free


def sync(path: Path) -> None:
    """Waits until a file, or a folder's list of files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def drop_half_line(path: Path) -> None:
    """Takes off what stands behind the last line break: a kill cut it short."""
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(end - (1 << 16), 0)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:  # else nothing was written, and the documents made of it are still good
            file.truncate(end)


def lock(file: IO[str], path: Path) -> None:
    """RecipeError where another process holds the file. The lock ends with this process, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecipeError(f"another process writes {path} at this moment; wait for its end, or stop it") from None
