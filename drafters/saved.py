"""A trained drafter on disk: what training leaves in a run folder, for export and evaluation to pick up.

runs/<name>/drafter.json        method, target, shape, config      (Description)
runs/<name>/vocabulary.json     the draft vocabulary
runs/<name>/checkpoints/        step-000200/drafter.safetensors, progress.json
"""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from safetensors.torch import load_file
from torch import Tensor

from data.target import Dtype, title
from data.vocabulary import read_vocabulary
from drafters.drafter import Drafter, FrozenTarget
from drafters.layers import DrafterShape
from recipes.load import RecipeError, build, to_plain


@dataclass(frozen=True)
class Description:
    """All that rebuilds a drafter but its weights and vocabulary.

    method: its file in drafters/. target: the target's folder; target_model: as the recipe names it; config: the
    method's own settings, resolved.
    """

    method: str
    target: Path
    target_model: str
    target_dtype: Dtype
    shape: DrafterShape
    config: dict[str, Any]

    @property
    def title(self) -> str:
        """What to call the drafter where people read it."""
        method = {"eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}.get(self.method, self.method)
        return f"{method} drafter for {title(self.target_model)}"

    @property
    def is_local(self) -> bool:
        """Whether the target is a folder here, not a model of the Hub."""
        return self.target_model.startswith("package:") or Path(self.target_model).expanduser().exists()

    @property
    def served_as(self) -> str:
        """What to call the target on vLLM's command line: its Hub id where it has one, else its folder."""
        return str(self.target) if self.is_local else self.target_model

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Ids of the target's states that the drafter reads, ascending; k: after k decoder layers."""
        return tuple(self.config["aux_layers"])


class Saved(NamedTuple):
    """A drafter as found on disk. step: the checkpoint's; acceptance_length: as validated when it was saved. calibration: what
    calibration.json has of this very step, else empty."""

    folder: Path
    description: Description
    kept_W: Tensor
    weights: dict[str, Tensor]
    step: int
    acceptance_length: float
    calibration: dict[str, Any]


class _Method(Protocol):
    def rebuild(self, saved: Saved, target: FrozenTarget | None) -> Drafter: ...


def describe(description: Description) -> str:
    """The text of drafter.json."""
    return json.dumps(to_plain(description), indent=1)


def best_step(checkpoints: Path) -> int | None:
    """The step of the checkpoint that validated best, the earliest of equals; None where none was validated."""
    found = [
        (json.loads(path.read_text())["acceptance_length"], int(path.parent.name.removeprefix("step-")))
        for path in sorted(checkpoints.glob("step-*/progress.json"))
    ]
    lengths = {step: length for length, step in found if length is not None}
    return max(lengths, key=lambda step: lengths[step]) if lengths else None


def read_saved(folder: Path) -> Saved:
    """The best validated drafter of a run folder; RecipeError when the folder holds none."""
    if not (folder / "drafter.json").is_file():
        raise RecipeError(f"{folder} is not a run folder (no drafter.json); give one that training made, runs/<name>-<method>")
    step = best_step(folder / "checkpoints")
    if step is None:
        raise RecipeError(f"{folder} has no validated checkpoint yet; train it first, or to its next validation")
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    if not (checkpoint / "drafter.safetensors").is_file():
        raise RecipeError(f"{checkpoint} has no drafter.safetensors; train again, or restore that file")
    path = folder / "calibration.json"
    calibration = json.loads(path.read_text()) if path.is_file() else {}
    return Saved(
        folder=folder,
        description=build(Description, json.loads((folder / "drafter.json").read_text()), "drafter.json"),
        kept_W=read_vocabulary(folder / "vocabulary.json").kept_W,
        weights=load_file(checkpoint / "drafter.safetensors"),
        step=step,
        acceptance_length=json.loads((checkpoint / "progress.json").read_text())["acceptance_length"],
        calibration=calibration if calibration.get("step") == step else {},
    )


def rebuild(saved: Saved, target: FrozenTarget | None) -> Drafter:
    """The drafter itself, in eval mode: ``drafters/<method>.py`` builds it."""
    module = cast(_Method, importlib.import_module(f"drafters.{saved.description.method}"))
    return module.rebuild(saved, target).eval()
