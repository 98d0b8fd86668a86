"""The workload of a recipe: its settings, its folder, its prompts, and the split of conversations by content.

A workload keeps its files in one folder, runs/<recipe name>-data/, which every method's run shares:

    prompts.jsonl   prompts that the target synthesised
    answers.jsonl   conversations whose answers the target wrote: messages, token ids, finish_reason, sampling settings
    documents/      the tokenised conversations, made anew when any of this changes
    refused.jsonl   rows that were left out of it, with place and reason; refused-prompts.jsonl: those of the prompts
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from data.rows import Conversation, content_id
from data.sources import Leaks, Refusals, Source, conversations, say
from data.target import TargetConfig
from recipes.load import RecipeError


@dataclass(frozen=True)
class SamplingConfig:
    """How the target answers. temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 1024


@dataclass(frozen=True)
class SynthesisConfig:
    """Self-synthesised prompts (Magpie, arXiv 2406.08464): how many to write, and how the target is sampled for them.

    Kept are those of min_words to max_words words in the language (ISO 639-1; null: any), whose 5-grams of characters are not those
    of an earlier one by more than max_similarity (Jaccard).
    """

    num_prompts: int = 1000
    language: str | None = "en"
    min_words: int = 3
    max_words: int = 200
    max_similarity: float = 0.7
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, top_p=0.99, max_tokens=128)


@dataclass(frozen=True)
class DataConfig:
    """What a drafter learns from.

    prompts: sources of what the target is to answer; null lets it synthesise its own. answers: how it answers. answered: sources
    of conversations that are trained on as they are. evaluation: sources of prompts that are kept out of training.
    chat_template_kwargs: passed on to the target's chat template, as a server is told to. keep_truncated: train on answers cut by
    max_tokens, too. max_length: tokens of one document; longer ones are cut, at the end of an answer where there is one.
    max_bad_share: of rows that cannot be used; with more of them the run stops. test_share and validation_share: of conversations,
    by hash. num_proc: processes that tokenise; null: one per core. tensor_parallel_size: GPUs that share one copy of the target
    while it writes.
    """

    prompts: tuple[Source, ...] | None = None
    synthesis: SynthesisConfig = SynthesisConfig()
    answers: SamplingConfig = SamplingConfig()
    answered: tuple[Source, ...] = ()
    evaluation: tuple[Source, ...] = ()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    keep_truncated: bool = False
    max_length: int = 2048
    max_bad_share: float = 0.01
    test_share: float = 0.05
    validation_share: float = 0.05
    num_proc: int | None = None
    tensor_parallel_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        try:
            json.dumps(self.chat_template_kwargs)
        except TypeError as error:
            raise RecipeError(f"data.chat_template_kwargs: {error}; write it in quotes") from None
        if self.test_share + self.validation_share >= 1:
            raise RecipeError(
                f"data.test_share + data.validation_share is {self.test_share + self.validation_share:g}; give less than 1"
            )
        for source in (*(self.prompts or ()), *self.evaluation):
            if source.weight > 1:
                raise RecipeError(f"the weight of {source.path} is {source.weight}, but a prompt is answered once; give 1 or less")


@dataclass(frozen=True)
class DataRecipe:
    """What the scripts of this folder read of a recipe."""

    name: str
    target: TargetConfig
    data: DataConfig


Split = Literal["train", "validation", "test"]


def data_folder(name: str) -> Path:
    """Where the workload of the recipe ``name`` keeps its files."""
    return Path("runs") / f"{name}-data"


def synthesised_path(name: str) -> Path:
    """The file of prompts that the target wrote itself."""
    return data_folder(name) / "prompts.jsonl"


def answers_path(name: str) -> Path:
    """The file of answered conversations of the recipe ``name``."""
    return data_folder(name) / "answers.jsonl"


def read_prompts(data: DataConfig, name: str, leaks: Leaks) -> Iterator[tuple[str, Conversation]]:
    """(id, conversation) of every prompt, in order; one given twice counts once, one of ``leaks`` not at all.

    A last answer that a conversation has already is taken off: the target writes its own. Rows that are left out are listed in
    refused-prompts.jsonl. RecipeError at the end where too many rows were bad, or none was good.
    """
    if data.prompts is None and not synthesised_path(name).is_file():
        also = "; data.answered is trained on as it stands" if data.answered else ""
        raise RecipeError(
            f"there is no prompt to answer: python data/synthesize.py <recipe> makes some, or name data.prompts{also}"
        )
    sources = (Source(str(synthesised_path(name))),) if data.prompts is None else data.prompts
    refusals, seen, twice = Refusals(listed_in=data_folder(name) / "refused-prompts.jsonl"), set(), 0
    for where, conversation in conversations(sources, refusals):
        if conversation.text is not None:
            refusals.add(where, "plain text asks nothing", "give it under data.answered")
            continue
        asked = conversation.asked()
        if leaks.has(asked):
            refusals.add(where, "an evaluation prompt", "it is in data.evaluation", harmless=True)
        elif asked.id in seen:
            twice += 1
        else:
            seen.add(asked.id)
            yield asked.id, asked
    for line in refusals.lines() + ([f"{twice} x asked before, word for word"] if twice else []):
        say(f"prompts left out: {line}")
    refusals.check(data.max_bad_share)
    if not seen:
        raise RecipeError(f"{', '.join(source.path for source in sources)}: no prompts")


def split_of(conversation: Conversation, data: DataConfig) -> Split:
    """The split a conversation belongs to: a function of its opening, up to the first user turn, and of nothing else.

    So all continuations of one opening land on one side, and adding data moves no conversation.
    """
    messages, text = conversation.messages, conversation.text
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    opening = content_id(messages[: users[0] + 1]) if users else content_id([], text=text)
    where = int(opening, 16) / 16 ** len(opening)
    if where < data.test_share:
        return "test"
    return "validation" if where < data.test_share + data.validation_share else "train"


def repeated_share(answers: Iterable[list[int]], *, n: int = 8) -> float:
    """Share of the n-grams of all answers that occurred before in the same answer: a model that loops flatters acceptance."""
    repeated = total = 0
    for tokens in answers:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / max(total, 1)
