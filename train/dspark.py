"""Trains a DSpark drafter for a frozen target.

    accelerate launch train/dspark.py recipes/smollm2_cpu.yaml

The target's answers must be there (python data/regenerate.py recipes/smollm2_cpu.yaml). Started again after a stop, it goes on
at its newest checkpoint; after the end, it has nothing to do. Any value can be set over the recipe's: dspark.optim.lr=3e-4.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import recipes.cpu  # noqa: F401  # before torch

# isort: split
import torch

from data.conversations import DataConfig
from data.target import TargetConfig
from drafters.block import resolve
from drafters.calibration import fit_each, fit_scaling
from drafters.dspark import DSparkConfig, DSparkDrafter, rebuild
from drafters.layers import DrafterShape
from drafters.saved import read_saved
from recipes.files import write_atomically
from recipes.load import RecipeError, run_script, to_plain
from train.loop import OptimConfig, TrainConfig
from train.plan import plan
from train.prepare import Prepared, prepare, read_recipe, run_training


@dataclass(frozen=True)
class DSparkSection:
    """The recipe's dspark section. warm_start: a run folder of DFlash, whose backbone this one starts from."""

    warm_start: Path | None = None
    drafter: DSparkConfig = DSparkConfig()
    optim: OptimConfig = OptimConfig(lr=6e-4)


@dataclass(frozen=True)
class Recipe:
    """What this script reads of a recipe."""

    name: str
    target: TargetConfig
    data: DataConfig
    dspark: DSparkSection
    train: TrainConfig = TrainConfig()


def start_from(drafter: DSparkDrafter, folder: Path, *, shape: DrafterShape) -> None:
    """Takes over the backbone of a DFlash run; RecipeError where it is of another kind, target, layout or vocabulary."""
    saved = read_saved(folder)
    theirs, ours = saved.description.config, to_plain(drafter.backbone)
    same = ("num_layers", "aux_layers", "mask_token_id", "causal", "sliding_window", "draft_vocab_size")
    other = [f"{name} {theirs.get(name)} instead of {ours[name]}" for name in same if theirs.get(name) != ours[name]]
    if saved.description.method != "dflash":
        other = [f"method {saved.description.method}"]
    elif theirs["own_mask_embedding"]:
        other.append("own_mask_embedding, which DSpark has not")
    elif saved.description.shape != shape or not torch.equal(saved.kept_W, drafter.kept_W.cpu()):
        other.append("another target or draft vocabulary")
    if other:
        raise RecipeError(
            f"dspark.warm_start is {folder}, which does not fit: {'; '.join(other)}; give a DFlash run of this recipe"
        )
    drafter.load_state_dict(saved.weights, strict=False)


def calibrate(run: Prepared[DSparkConfig]) -> None:
    """Writes calibration.json: how to scale the best checkpoint's confidences, fitted on the validation answers. of_all: one
    scaling of all drafts; of_each: behind it, one for each draft of a block."""
    saved = read_saved(run.folder)
    drafter = rebuild(saved, run.frozen).to(run.accelerator.device)
    batches = (run.teacher.batch([[document]]) for document in run.validation_docs)
    logits_RK, accepted_RK, reached_RK = drafter.judge_confidence(batches, run.teacher.head)
    of_all = fit_scaling(logits_RK[reached_RK], accepted_RK[reached_RK])
    of_each = fit_each(of_all.of(logits_RK), accepted_RK, reached_RK)
    content = {"step": saved.step, "of_all": of_all._asdict(), "of_each": [scaling._asdict() for scaling in of_each]}
    if run.accelerator.is_main_process:
        write_atomically(run.folder / "calibration.json", json.dumps(content))


def main() -> None:
    recipe, only_plan = read_recipe(Recipe, __doc__)
    wanted = recipe.dspark.drafter
    if only_plan:
        print(plan(recipe, wanted, resolve, DSparkDrafter))
        return
    run = prepare(recipe, wanted, resolve, method="dspark")
    torch.manual_seed(recipe.train.seed)
    drafter = DSparkDrafter(run.shape, run.config, kept_W=run.vocabulary.kept_W, target=run.frozen)
    if recipe.dspark.warm_start is not None:
        start_from(drafter, recipe.dspark.warm_start, shape=run.shape)
    run_training(run, drafter, recipe.dspark.optim)
    left = not read_saved(run.folder).calibration
    run.accelerator.wait_for_everyone()
    if left:
        calibrate(run)  # by all processes: they may hold the target together
    run.accelerator.print(f"next: python export/checkpoint.py {run.folder}")
    run.accelerator.end_training()


if __name__ == "__main__":
    run_script(main)
