"""Trains an EAGLE-3 drafter for a frozen target.

    accelerate launch train/eagle3.py recipes/llama70b.yaml

The target's answers must be there (python data/regenerate.py recipes/llama70b.yaml). Started again after a stop, it goes on
at its newest checkpoint; after the end, it has nothing to do. Any value can be set over the recipe's: eagle3.optim.lr=3e-4.
"""

from dataclasses import dataclass

import recipes.cpu  # noqa: F401  # before torch

# isort: split
import torch

from data.conversations import DataConfig
from data.target import TargetConfig
from drafters.eagle3 import Eagle3Config, Eagle3Drafter, resolve
from recipes.load import run_script
from train.loop import OptimConfig, TrainConfig
from train.plan import plan
from train.prepare import prepare, read_recipe, run_training


@dataclass(frozen=True)
class Eagle3Section:
    """The recipe's eagle3 section."""

    drafter: Eagle3Config = Eagle3Config()
    optim: OptimConfig = OptimConfig()


@dataclass(frozen=True)
class Recipe:
    """What this script reads of a recipe."""

    name: str
    target: TargetConfig
    data: DataConfig
    eagle3: Eagle3Section
    train: TrainConfig = TrainConfig()


def main() -> None:
    recipe, only_plan = read_recipe(Recipe, __doc__)
    wanted = recipe.eagle3.drafter
    if only_plan:
        print(plan(recipe, wanted, resolve, Eagle3Drafter))
        return
    run = prepare(recipe, wanted, resolve, method="eagle3")
    torch.manual_seed(recipe.train.seed)
    drafter = Eagle3Drafter(run.shape, run.config, kept_W=run.vocabulary.kept_W, target=run.frozen)
    run_training(run, drafter, recipe.eagle3.optim)
    run.accelerator.print(f"next: python export/checkpoint.py {run.folder}")
    run.accelerator.end_training()


if __name__ == "__main__":
    run_script(main)
