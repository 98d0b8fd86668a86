"""Trains an EAGLE-3 drafter for a frozen target.

    accelerate launch train/eagle3.py recipes/llama70b.yaml

The target's answers must be there (python data/regenerate.py recipes/llama70b.yaml). Started again after a stop, it goes on
at its newest checkpoint; after the end, it has nothing to do. Any value can be set over the recipe's: eagle3.optim.lr=3e-4.
"""

from dataclasses import dataclass

import torch

from data.conversations import DataConfig
from data.target import TargetConfig
from data.teacher import aux_layer_ids
from drafters.eagle3 import Eagle3Config, Eagle3Drafter
from drafters.layers import DrafterShape
from recipes.load import load_recipe, recipe_arguments, run_script
from train.loop import OptimConfig, TrainConfig, fit
from train.plan import plan, planned_target
from train.prepare import prepare


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
    parser = recipe_arguments(__doc__)
    parser.add_argument("--plan", action="store_true", help="print sizes, memory and cost; train nothing")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, Recipe, arguments.overrides)
    config, optim = recipe.eagle3.drafter, recipe.eagle3.optim

    if arguments.plan:
        target_config = planned_target(recipe.target)
        shape = DrafterShape.of(target_config)
        with torch.device("meta"):
            kept_W = torch.arange(config.draft_vocab_size or shape.vocab_size)
            num_aux_layers = len(aux_layer_ids(recipe.target, target_config))
            on_paper = Eagle3Drafter(shape, config, num_aux_layers=num_aux_layers, kept_W=kept_W)
        print(plan(on_paper, target_config, recipe.target, recipe.train, passes=config.num_steps))
        return
    run = prepare(recipe, method="eagle3", drafter_config=config, draft_vocab_size=config.draft_vocab_size)
    torch.manual_seed(recipe.train.seed)
    drafter = Eagle3Drafter(run.shape, config, num_aux_layers=len(run.aux_layers), kept_W=run.vocabulary.kept_W, target=run.frozen)
    fit(
        run.accelerator,
        drafter,
        run.teacher,
        folder=run.folder,
        train_docs=run.train_docs,
        validation_docs=run.validation_docs,
        optim=optim,
        train=recipe.train,
    )
    run.accelerator.print(f"next: python export/checkpoint.py {run.folder}")


if __name__ == "__main__":
    run_script(main)
