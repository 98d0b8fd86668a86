"""What every method's script does before it builds its drafter: finds the target, reads the answers, opens the run folder."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import torch
from accelerate import Accelerator

from data.chat import Chat
from data.documents import Documents, open_documents
from data.store import StoredTeacher
from data.target import resolve_target, target_fingerprint
from data.target_model import is_sharded, load_target, target_model_config
from data.teacher import OnlineTeacher, Teacher, check_aux_layers
from data.vocabulary import DraftVocabulary, build_vocabulary, find_mask_token, kept_always, read_vocabulary, vocabulary_text
from drafters.drafter import Drafter, FrozenTarget
from drafters.layers import DrafterShape
from drafters.saved import Description, describe
from recipes.files import write_atomically
from recipes.load import RecipeError, load_recipe, recipe_arguments, to_plain
from train.launch import make_accelerator
from train.loop import OptimConfig, fit
from train.plan import AnyConfig, AnyRecipe, Resolve
from train.run_folder import claim, open_run

T = TypeVar("T")
Config = TypeVar("Config", bound=AnyConfig)


@dataclass(frozen=True)
class Prepared(Generic[Config]):
    """All that a run starts from. config: the method's own settings, resolved. claimed: what keeps other launches off the folder,
    open in the main process."""

    config: Config
    recipe: AnyRecipe
    folder: Path
    claimed: IO[str] | None
    accelerator: Accelerator
    teacher: Teacher
    frozen: FrozenTarget
    shape: DrafterShape
    vocabulary: DraftVocabulary
    train_docs: Documents
    validation_docs: Documents


def read_recipe(kind: type[T], doc: str | None) -> tuple[T, bool]:
    """The recipe a training script was started with, and whether only its plan is wanted (--plan)."""
    parser = recipe_arguments(doc or "")
    parser.add_argument("--plan", action="store_true", help="print sizes, memory and cost; train nothing")
    arguments = parser.parse_intermixed_args()
    return load_recipe(arguments.recipe, kind, arguments.overrides), arguments.plan


def prepare(recipe: AnyRecipe, wanted: Config, resolve: Resolve[Config], *, method: str) -> Prepared[Config]:
    """Checks and loads everything a run needs, cheapest first; RecipeError for whatever is wrong with it.

    wanted: the recipe's settings of the method; resolve: what fills in those it leaves open.

    Writes into the run folder, runs/<name>-<method>/: recipe.yaml, provenance.json, vocabulary.json, and drafter.json, from
    which export and evaluation rebuild the drafter.
    """
    target, data, train = recipe.target, recipe.data, recipe.train
    folder = Path("runs") / "-".join([recipe.name, method, *([train.tag] if train.tag else [])])
    target_folder = resolve_target(target)
    target_config = target_model_config(target_folder)
    shape = DrafterShape.of(target_config)
    if wanted.aux_layers is not None:
        check_aux_layers(wanted.aux_layers, shape.num_target_layers)
    chat = Chat.load(target_folder, data.chat_template_kwargs)
    made_from = {"target": target_fingerprint(target_folder)}
    if data.max_length > train.row_tokens:
        raise RecipeError(f"data.max_length is {data.max_length}, but a row holds train.row_tokens = {train.row_tokens}; raise it")

    accelerator = make_accelerator(train, folder)
    with accelerator.main_process_first():
        found = open_documents(data, recipe.name, chat=chat, target=made_from["target"])
    train_docs, validation_docs = found.split("train"), found.split("validation")
    config = resolve(
        wanted,
        shape.num_target_layers,
        lambda: find_mask_token(chat, chain(train_docs, validation_docs), vocab_size=shape.vocab_size),
    )
    assert config.aux_layers is not None
    made_from["training data"] = found.folder.name
    claimed = None
    if accelerator.is_main_process:
        claimed = claim(folder)
        open_run(folder, recipe, made_from)
        description = Description(method, target_folder, target.model, target.dtype, shape, to_plain(config))
        if not (folder / "vocabulary.json").is_file():
            vocabulary = build_vocabulary(
                train_docs,
                size=config.draft_vocab_size,
                vocab_size=shape.vocab_size,
                always=kept_always(chat, vocab_size=shape.vocab_size),
                made_from=made_from,
            )
            write_atomically(folder / "vocabulary.json", vocabulary_text(vocabulary))
        read_vocabulary(folder / "vocabulary.json", made_from=made_from)
        write_atomically(folder / "drafter.json", describe(description))
    accelerator.wait_for_everyone()
    # After the folder is known to be this run's: some trackers write there at once.
    try:
        accelerator.init_trackers("pacesetter", flat(recipe), {"wandb": {"dir": str(folder), "name": folder.name}})
    except Exception as error:  # each has its own: no key, no network
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(
            f"train.trackers {list(train.trackers)} cannot start: {reason} (for wandb: wandb login, or WANDB_MODE=offline)"
        ) from None
    teacher, frozen = open_teacher(
        recipe, target_folder, config.aux_layers, made_from["target"], accelerator.device, [train_docs, validation_docs]
    )
    return Prepared(
        config=config,
        recipe=recipe,
        folder=folder,
        claimed=claimed,
        accelerator=accelerator,
        teacher=teacher,
        frozen=frozen,
        shape=shape,
        vocabulary=read_vocabulary(folder / "vocabulary.json"),
        train_docs=train_docs,
        validation_docs=validation_docs,
    )


def open_teacher(
    recipe: AnyRecipe,
    folder: Path,
    aux_layers: tuple[int, ...],
    fingerprint: str,
    device: torch.device,
    docs: Sequence[Documents],
) -> tuple[Teacher, FrozenTarget]:
    """Where features come from, the target here or a store of them, and the target's own tensors that drafters read."""
    target = recipe.target
    if recipe.train.features is not None:
        stored = StoredTeacher(recipe.train.features, aux_layers, target=fingerprint, dtype=target.dtype, device=device)
        stored.require(chain(*docs))
        return stored, FrozenTarget(stored.embedding_VH, stored.head)
    model = load_target(folder, target, device)
    return OnlineTeacher(model, aux_layers, together=is_sharded(target)), FrozenTarget.of(model)


def run_training(run: Prepared[Config], drafter: Drafter, optim: OptimConfig) -> None:
    """Trains ``drafter`` to the end."""
    fit(
        run.accelerator,
        drafter,
        run.teacher,
        folder=run.folder,
        train_docs=run.train_docs,
        validation_docs=run.validation_docs,
        optim=optim,
        train=run.recipe.train,
    )


SECRETS = re.compile(r"\b(?:hf_|sk-|wandb_v1_)[\w-]{8,}|(?<=://)[^/@\s]+(?=@)")
"""Tokens of the Hub, of OpenAI-like servers and of wandb, and a user with password in an address."""


def flat(recipe: Any) -> dict[str, str]:
    """A recipe as dotted key -> text, which every tracker takes; what looks like a secret is left out of it."""
    found: dict[str, str] = {}

    def visit(value: Any, where: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                visit(inner, f"{where}.{key}" if where else key)
        else:
            found[where] = SECRETS.sub("***", str(value))

    visit(to_plain(recipe), "")
    return found
