"""A run's folder: its recipe, where it came from, its metrics, and checkpoints that no crash can spoil.

runs/<name>/
  recipe.yaml        the resolved recipe        provenance.json   versions, commit, hardware, fingerprints
  drafter.json       all that rebuilds the drafter, next to its weights
  vocabulary.json    the draft vocabulary       metrics.jsonl     a line per logged step and validation
  checkpoints/step-000200/   state/ (accelerate's own), drafter.safetensors, progress.json
  checkpoints/best.json      which step validated best
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from recipes.load import RecipeError, to_plain
from recipes.provenance import environment


def open_run(folder: Path, recipe: Any, provenance: dict[str, Any]) -> None:
    """Makes the run folder, or checks that the one there belongs to the same recipe and the same inputs.

    Raises RecipeError naming the first keys that differ; nothing is overwritten.
    """
    plain = to_plain(recipe)
    path = folder / "recipe.yaml"
    if path.is_file():
        there = yaml.safe_load(path.read_text())
        if differing := sorted(_differences(there, plain)):
            raise RecipeError(
                f"{folder} was made with other values of {', '.join(differing)}; give this run a train.tag, or delete that folder"
            )
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise RecipeError(f"{folder} is not empty and is not a run of this recipe (no recipe.yaml); give this run a train.tag")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "provenance.json", json.dumps({**provenance, **environment()}, indent=1))
    write_atomically(path, yaml.safe_dump(plain, sort_keys=False))


def _differences(there: Any, here: Any, where: str = "") -> Iterator[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in {**there, **here}:
            yield from _differences(there.get(key), here.get(key), f"{where}.{key}" if where else key)
    elif there != here:
        yield where


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
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if full or _free_bytes(path) < 1 << 20:
            raise RecipeError(
                f"the disk of {path.parent} is full; free some space and start again: it goes on at its last checkpoint"
            ) from error
        raise


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(path.parent if path.parent.is_dir() else ".").free


def steps_saved(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a run folder, ascending."""
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def checkpoint_folder(folder: Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` optimiser steps."""
    return folder / "checkpoints" / f"step-{step:06d}"


def commit_checkpoint(aside: Path, final: Path) -> None:
    """Syncs every file of a finished checkpoint and renames its folder into place; until then it does not exist."""
    with explain_full_disk(final):
        for path in [*sorted(aside.rglob("*")), aside]:
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        if final.is_dir():  # left by a run that was stopped between saving and noting it
            shutil.rmtree(final)
        aside.rename(final)
        parent = os.open(final.parent, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)


def prune_checkpoints(folder: Path, *, keep: int) -> None:
    """Removes all but the last ``keep`` checkpoints and the best one."""
    best = read_best(folder)
    for step in steps_saved(folder)[:-keep]:
        if best is None or step != best["step"]:
            shutil.rmtree(checkpoint_folder(folder, step))


def read_best(folder: Path) -> dict[str, Any] | None:
    """{"step", "acceptance_length"} of the best validated checkpoint, or None."""
    path = folder / "checkpoints" / "best.json"
    return json.loads(path.read_text()) if path.is_file() else None


def write_best(folder: Path, step: int, acceptance_length: float) -> None:
    """Notes that the checkpoint of ``step`` validated best."""
    content = {"step": step, "acceptance_length": acceptance_length}
    write_atomically(folder / "checkpoints" / "best.json", json.dumps(content))


def append_metrics(folder: Path, row: dict[str, Any]) -> None:
    """Appends a line to metrics.jsonl."""
    with explain_full_disk(folder / "metrics.jsonl"), (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def drop_metrics_after(folder: Path, step: int) -> None:
    """Removes lines of metrics.jsonl beyond ``step``: a resumed run writes them again."""
    path = folder / "metrics.jsonl"
    if path.is_file():
        rows = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
        write_atomically(path, "".join(f"{row}\n" for row in rows))
