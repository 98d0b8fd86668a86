"""What every method's script does before it builds its drafter: finds the target, reads the answers, opens the run folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator

from data.chat import eos_ids, load_tokenizer
from data.conversations import DataConfig, Document, data_fingerprint, documents, read_answers
from data.target import TargetConfig, resolve_target, target_fingerprint
from data.teacher import OnlineTeacher, aux_layer_ids, load_target, target_model_config
from data.vocabulary import DraftVocabulary, build_vocabulary, read_vocabulary, vocabulary_text
from drafters.drafter import FrozenTarget
from drafters.layers import DrafterShape
from drafters.saved import Description, describe
from recipes.load import RecipeError, to_plain
from train.loop import TrainConfig, make_accelerator
from train.run_folder import open_run, write_atomically


@dataclass(frozen=True)
class Prepared:
    """All that a run starts from."""

    folder: Path
    accelerator: Accelerator
    teacher: OnlineTeacher
    frozen: FrozenTarget
    shape: DrafterShape
    aux_layers: tuple[int, ...]
    vocabulary: DraftVocabulary
    train_docs: list[Document]
    validation_docs: list[Document]


class AnyRecipe(Protocol):
    """The sections that every method's recipe has."""

    @property
    def name(self) -> str: ...
    @property
    def target(self) -> TargetConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def train(self) -> TrainConfig: ...


def prepare(recipe: AnyRecipe, *, method: str, drafter_config: Any, draft_vocab_size: int | None) -> Prepared:
    """Checks and loads everything a run needs, cheapest first; RecipeError for whatever is wrong with it.

    Writes into the run folder, runs/<name>-<method>/: recipe.yaml, provenance.json, vocabulary.json, and drafter.json, from
    which export and evaluation rebuild the drafter.
    """
    target, data, train = recipe.target, recipe.data, recipe.train
    folder = Path("runs") / "-".join([recipe.name, method, *([train.tag] if train.tag else [])])
    target_folder = resolve_target(target)
    target_config = target_model_config(target_folder)
    aux_layers = aux_layer_ids(target, target_config)
    tokenizer = load_tokenizer(target_folder)
    eos = eos_ids(tokenizer, target_folder)
    rows = read_answers(data, recipe.name)
    train_docs = documents(rows, data, "train", tokenizer=tokenizer, eos=eos)
    validation_docs = documents(rows, data, "validation", tokenizer=tokenizer, eos=eos)
    if data.max_length > train.row_tokens:
        raise RecipeError(f"data.max_length is {data.max_length}, but a row holds train.row_tokens = {train.row_tokens}; raise it")

    accelerator = make_accelerator(train, folder)
    shape = DrafterShape.of(target_config)
    made_from = {"target": target_fingerprint(target_folder), "training data": data_fingerprint(train_docs)}
    if accelerator.is_main_process:
        open_run(folder, recipe, made_from)
        description = Description(method, target_folder, target.model, target.dtype, aux_layers, shape, to_plain(drafter_config))
        if not (folder / "vocabulary.json").is_file():
            vocabulary = build_vocabulary(
                train_docs, size=draft_vocab_size, vocab_size=shape.vocab_size, always=eos, made_from=made_from
            )
            write_atomically(folder / "vocabulary.json", vocabulary_text(vocabulary))
        read_vocabulary(folder / "vocabulary.json", made_from=made_from)
        write_atomically(folder / "drafter.json", describe(description))
    accelerator.wait_for_everyone()
    # After the folder is known to be this run's: some trackers write there at once.
    accelerator.init_trackers("pacesetter", flat(recipe), {"wandb": {"dir": str(folder), "name": folder.name}})
    model = load_target(target_folder, target, accelerator.device)
    teacher = OnlineTeacher(model, aux_layers, cache_bytes=int(train.feature_cache_gib * 2**30))
    return Prepared(
        folder=folder,
        accelerator=accelerator,
        teacher=teacher,
        frozen=FrozenTarget.of(model),
        shape=shape,
        aux_layers=aux_layers,
        vocabulary=read_vocabulary(folder / "vocabulary.json"),
        train_docs=train_docs,
        validation_docs=validation_docs,
    )


def flat(recipe: Any) -> dict[str, str]:
    """A recipe as dotted key -> text, which every tracker takes."""
    found: dict[str, str] = {}

    def visit(value: Any, where: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                visit(inner, f"{where}.{key}" if where else key)
        else:
            found[where] = str(value)

    visit(to_plain(recipe), "")
    return found
