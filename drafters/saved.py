"""A trained drafter on disk: what training leaves in a run folder, for export and evaluation to pick up.

runs/<name>/drafter.json        method, target, shape, config      (Description)
runs/<name>/vocabulary.json     the draft vocabulary
runs/<name>/checkpoints/        best.json, step-000200/drafter.safetensors
"""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from safetensors.torch import load_file
from torch import Tensor

from data.target import Dtype
from data.vocabulary import read_vocabulary
from drafters.drafter import Drafter, FrozenTarget
from drafters.layers import DrafterShape
from recipes.load import RecipeError, build, to_plain


@dataclass(frozen=True)
class Description:
    """All that rebuilds a drafter but its weights and vocabulary.

    method: its file in drafters/. target: the target's folder; target_model: as the recipe names it; aux_layers: as in
    TargetConfig, resolved; config: the method's own settings.
    """

    method: str
    target: Path
    target_model: str
    target_dtype: Dtype
    aux_layers: tuple[int, ...]
    shape: DrafterShape
    config: dict[str, Any]


class Saved(NamedTuple):
    """A drafter as found on disk. step: the checkpoint's; acceptance_length: as validated when it was saved."""

    folder: Path
    description: Description
    kept_W: Tensor
    weights: dict[str, Tensor]
    step: int
    acceptance_length: float


class _Method(Protocol):
    def rebuild(self, saved: Saved, target: FrozenTarget | None) -> Drafter: ...


def describe(description: Description) -> str:
    """The text of drafter.json."""
    return json.dumps(to_plain(description), indent=1)


def read_saved(folder: Path) -> Saved:
    """The best validated drafter of a run folder; RecipeError when the folder holds none."""
    if not (folder / "drafter.json").is_file():
        raise RecipeError(f"{folder} is not a run folder (no drafter.json); give one that training made, runs/<name>-<method>")
    best_path = folder / "checkpoints" / "best.json"
    if not best_path.is_file():
        raise RecipeError(f"{folder} has no checkpoint yet; train it first")
    best = json.loads(best_path.read_text())
    weights_path = folder / "checkpoints" / f"step-{best['step']:06d}" / "drafter.safetensors"
    if not weights_path.is_file():
        raise RecipeError(f"{weights_path} is missing, though best.json names it; train again, or restore that checkpoint")
    return Saved(
        folder=folder,
        description=build(Description, json.loads((folder / "drafter.json").read_text()), "drafter.json"),
        kept_W=read_vocabulary(folder / "vocabulary.json").kept_W,
        weights=load_file(weights_path),
        step=best["step"],
        acceptance_length=best["acceptance_length"],
    )


def rebuild(saved: Saved, target: FrozenTarget | None) -> Drafter:
    """The drafter itself, in eval mode: ``drafters/<method>.py`` builds it."""
    module = cast(_Method, importlib.import_module(f"drafters.{saved.description.method}"))
    return module.rebuild(saved, target).eval()
