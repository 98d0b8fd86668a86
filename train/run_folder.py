"""A run's folder: its recipe, where it came from, its metrics, and checkpoints that no crash can spoil.

runs/<name>/
  recipe.yaml        the resolved recipe        provenance.json   versions, commit, hardware, fingerprints
  drafter.json       all that rebuilds the drafter, next to its weights
  vocabulary.json    the draft vocabulary       metrics.jsonl     a line per logged step and validation
  checkpoints/step-000200/   state/ (accelerate's own), drafter.safetensors, progress.json (with its acceptance length)
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import yaml

from drafters.saved import best_step
from recipes.files import explain_full_disk, lock, sync, write_atomically
from recipes.load import RecipeError, build, to_plain
from recipes.provenance import environment

MAY_CHANGE = {"train.max_hours", "target.sharded", "train.gradient_checkpointing"}
"""How long a launch lasts, where the target's weights are, what memory is spared: nothing that a drafter learns from."""
OPENING_FILES = ("lock", "provenance.json", "provenance.json.partial", "recipe.yaml.partial")


def claim(folder: Path) -> IO[str]:
    """Makes the run folder this process's while the file that is returned is open; RecipeError where it is another's."""
    folder.mkdir(parents=True, exist_ok=True)
    held = (folder / ".lock").open("a")
    lock(held, folder)
    return held


def open_run(folder: Path, recipe: Any, provenance: dict[str, Any]) -> None:
    """Makes the run folder, or checks that the one there belongs to the same recipe and the same inputs.

    Raises RecipeError naming the first keys that differ; nothing is overwritten.
    """
    plain = to_plain(recipe)
    path = folder / "recipe.yaml"
    if path.is_file():
        differing = sorted(set(_differences(_filled(yaml.safe_load(path.read_text()), recipe), plain)) - MAY_CHANGE)
        if differing:
            raise RecipeError(
                f"{folder} was made with other values of {', '.join(differing)}; give this run a train.tag, or delete that folder"
            )
        return
    # provenance.json alone is what a run leaves that was stopped right here.
    if folder.is_dir() and any(path.name.removeprefix(".") not in OPENING_FILES for path in folder.iterdir()):
        raise RecipeError(f"{folder} is not empty and is not a run of this recipe (no recipe.yaml); give this run a train.tag")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "provenance.json", json.dumps({**provenance, **environment()}, indent=1))
    write_atomically(path, yaml.safe_dump(plain, sort_keys=False))


def _filled(there: Any, recipe: Any) -> Any:
    """A recipe as an earlier version wrote it, with the defaults of settings that it had not."""
    try:
        return to_plain(build(type(recipe), there, ""))
    except RecipeError:  # it has settings that there are no more
        return there


def _differences(there: Any, here: Any, where: str = "") -> Iterator[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in {**there, **here}:
            yield from _differences(there.get(key), here.get(key), f"{where}.{key}" if where else key)
    elif there != here:
        yield where


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
            sync(path)
        if final.is_dir():  # left by a run that was stopped between saving and noting it
            shutil.rmtree(final)
        aside.rename(final)
        sync(final.parent)


def prune_checkpoints(folder: Path, *, keep: int) -> None:
    """Removes all but the last ``keep`` checkpoints and the one that validated best."""
    steps = steps_saved(folder)
    best = best_step(folder / "checkpoints")
    for step in steps[: len(steps) - keep]:
        if step != best:
            shutil.rmtree(checkpoint_folder(folder, step))


def append_metrics(folder: Path, row: dict[str, Any]) -> None:
    """Appends a line to metrics.jsonl."""
    with explain_full_disk(folder / "metrics.jsonl"), (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def drop_metrics_after(folder: Path, step: int) -> None:
    """Removes lines of metrics.jsonl beyond ``step``: a resumed run writes them again."""
    path = folder / "metrics.jsonl"
    if path.is_file():
        # Only whole lines: a full disk may have cut the last one short.
        rows = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        write_atomically(path, "".join(row for row in rows if json.loads(row)["step"] <= step))
