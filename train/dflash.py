"""Trains a DFlash drafter for a frozen target.

    accelerate launch train/dflash.py recipes/smollm2_cpu.yaml

The target's answers must be there (python data/regenerate.py recipes/smollm2_cpu.yaml). Started again after a stop, it goes on
at its newest checkpoint; after the end, it has nothing to do. Any value can be set over the recipe's: dflash.optim.lr=3e-4.
"""

from dataclasses import dataclass

import recipes.cpu  # noqa: F401  # before torch

# isort: split
import torch

from data.conversations import DataConfig
from data.target import TargetConfig
from drafters.block import resolve
from drafters.dflash import DFlashConfig, DFlashDrafter
from recipes.load import run_script
from train.loop import OptimConfig, TrainConfig
from train.plan import plan
from train.prepare import prepare, read_recipe, run_training


@dataclass(frozen=True)
class DFlashSection:
    """The recipe's dflash section."""

    drafter: DFlashConfig = DFlashConfig()
    optim: OptimConfig = OptimConfig(lr=6e-4)


@dataclass(frozen=True)
class Recipe:
    """What this script reads of a recipe."""

    name: str
    target: TargetConfig
    data: DataConfig
    dflash: DFlashSection
    train: TrainConfig = TrainConfig()


def main() -> None:
    recipe, only_plan = read_recipe(Recipe, __doc__)
    wanted = recipe.dflash.drafter
    if only_plan:
        print(plan(recipe, wanted, resolve, DFlashDrafter))
        return
    run = prepare(recipe, wanted, resolve, method="dflash")
    torch.manual_seed(recipe.train.seed)
    drafter = DFlashDrafter(run.shape, run.config, kept_W=run.vocabulary.kept_W, target=run.frozen)
    run_training(run, drafter, recipe.dflash.optim)
    run.accelerator.print(f"next: python export/checkpoint.py {run.folder}")
    run.accelerator.end_training()


if __name__ == "__main__":
    run_script(main)
