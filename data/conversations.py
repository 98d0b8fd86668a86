"""Conversations in JSONL files: prompts to answer, answered conversations, and their split by content.

A workload keeps its files in one folder, runs/<recipe name>-data/, which every method's run shares:

    prompts.jsonl   one conversation per line, up to the turn the target has to answer
    answers.jsonl   the same, answered by the target: messages, token ids, finish_reason, sampling settings
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.chat import Message, encode
from recipes.load import RecipeError, locate


@dataclass(frozen=True)
class SamplingConfig:
    """How the target answers. temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 1024


@dataclass(frozen=True)
class SynthesisConfig:
    """Self-synthesised prompts (Magpie, arXiv 2406.08464): how many, and how the target is sampled for them."""

    num_prompts: int = 1000
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, top_p=0.99, max_tokens=128)


@dataclass(frozen=True)
class DataConfig:
    """What a drafter learns from.

    prompts: JSONL file of prompts (rows with "messages", or "prompt"); null lets the target synthesise its own. answers: how
    it answers them. keep_truncated: train on answers cut by max_tokens, too. max_length: tokens of one document; longer ones
    are cut. test_share and validation_share: of conversations, by hash. tensor_parallel_size: GPUs that share one copy of the
    target while it writes.
    """

    prompts: Path | None = None
    synthesis: SynthesisConfig = SynthesisConfig()
    answers: SamplingConfig = SamplingConfig()
    keep_truncated: bool = False
    max_length: int = 2048
    test_share: float = 0.05
    validation_share: float = 0.05
    tensor_parallel_size: int = 1
    seed: int = 0


Split = Literal["train", "validation", "test"]


class Document(NamedTuple):
    """One tokenised conversation: int64 tokens_T, bool loss_mask_T (True where the target produced the token)."""

    id: str
    tokens_T: Tensor
    loss_mask_T: Tensor


def data_folder(name: str) -> Path:
    """Where the workload of the recipe ``name`` keeps its files."""
    return Path("runs") / f"{name}-data"


def prompts_path(data: DataConfig, name: str) -> Path:
    """The file of prompts: the recipe's own, or the one the target synthesised."""
    if data.prompts is None:
        return data_folder(name) / "prompts.jsonl"
    return locate(data.prompts)


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, row) of every non-empty line; RecipeError with file and line where one is not a JSON object."""
    if not path.is_file():
        raise RecipeError(f"{path} does not exist")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise RecipeError(f"{path}, line {number}: not valid JSON: {error.msg}") from None
            if not isinstance(row, dict):
                raise RecipeError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
            yield number, row


def read_prompts(path: Path) -> dict[str, list[Message]]:
    """Prompts by their id, in file order; a prompt given twice counts once.

    Rows have "messages" ending with a user turn, or a "prompt" string. RecipeError for any other row, and for an empty file.
    """
    prompts: dict[str, list[Message]] = {}
    for number, row in read_jsonl(path):
        messages = _messages(row, f"{path}, line {number}")
        if messages[-1]["role"] != "user":
            raise RecipeError(f"{path}, line {number}: the last message must be the user's, for the target to answer")
        prompts[messages_id(messages)] = messages
    if not prompts:
        raise RecipeError(f"{path} has no prompts")
    return prompts


def _messages(row: dict[str, Any], where: str) -> list[Message]:
    if isinstance(row.get("prompt"), str):
        return [Message(role="user", content=row["prompt"])]
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RecipeError(f'{where}: needs "messages" (a list) or "prompt" (a string), has {sorted(row)}')
    for message in messages:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise RecipeError(f'{where}: every message needs a "role" and a "content" string, got {message!r}')
    return messages


def messages_id(messages: list[Message]) -> str:
    """Hash of a list of messages, blind to differences in white space."""
    text = json.dumps([(m["role"], " ".join(m["content"].split())) for m in messages], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def split_of(messages: list[Message], data: DataConfig) -> Split:
    """The split a conversation belongs to: a function of its opening, up to the first user turn, and of nothing else.

    So all continuations of one opening land on one side, and adding data moves no conversation.
    """
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    opening = messages_id(messages[: users[0] + 1])
    where = int(opening, 16) / 16 ** len(opening)
    if where < data.test_share:
        return "test"
    return "validation" if where < data.test_share + data.validation_share else "train"


class AnswerRow(NamedTuple):
    """A row of answers.jsonl: messages, the last one the target's answer; finish_reason, "stop" or "length".

    tokens: prompt and answer exactly as read and generated, answer_start: index of the answer's first token, target: fingerprint
    of the target that answered. All None in a row that was made elsewhere: its messages go through the target's chat template.
    """

    messages: list[Message]
    finish_reason: str
    tokens: list[int] | None
    answer_start: int | None
    target: str | None


def answers_path(name: str) -> Path:
    """The file of answered conversations of the recipe ``name``."""
    return data_folder(name) / "answers.jsonl"


def read_answers(data: DataConfig, name: str, *, target: str) -> list[AnswerRow]:
    """All answered conversations, in an order that depends on their content only; truncated ones only if the recipe keeps them.

    Raises RecipeError for a row that another target answered than the one with the fingerprint ``target``. A row whose prompt the
    recipe no longer has is left out.
    """
    path, prompts = answers_path(name), prompts_path(data, name)
    if not path.is_file():
        raise RecipeError(f"{path} does not exist; make it with: python data/regenerate.py <recipe>")
    asked = read_prompts(prompts).keys() if prompts.is_file() else None
    rows = {}
    for number, row in read_jsonl(path):
        messages = _messages(row, f"{path}, line {number}")
        if all(message["role"] != "user" for message in messages):
            raise RecipeError(f"{path}, line {number}: a conversation needs a user's turn")
        if row.get("target", target) != target:
            raise RecipeError(
                f"{path}, line {number}: answered by another target (fingerprint {row['target']}, this recipe's is {target}); "
                "give the recipe another name, or delete that file"
            )
        if asked is not None and "key" in row and row["key"] not in asked:
            continue
        reason = row.get("finish_reason", "stop")
        rows[messages_id(messages)] = AnswerRow(messages, reason, row.get("tokens"), row.get("answer_start"), row.get("target"))
    kept = {id: row for id, row in rows.items() if data.keep_truncated or row.finish_reason == "stop"}
    if not kept:
        cut = f"; all {len(rows)} were cut by data.answers.max_tokens: raise it, or set data.keep_truncated" if rows else ""
        raise RecipeError(f"{path} has no usable answers{cut}")
    return [kept[id] for id in sorted(kept)]


def documents(
    rows: list[AnswerRow], data: DataConfig, split: Split, *, tokenizer: PreTrainedTokenizerBase, eos: set[int]
) -> list[Document]:
    """The tokenised conversations of one split, cut to max_length; RecipeError when none has a token to draft.

    Where a row carries the generated ids they are used as they are: text tokenised a second time can come out otherwise.
    """
    found = []
    refused: list[str] = []
    for row in rows:
        if split_of(row.messages, data) != split:
            continue
        if row.tokens is not None and row.answer_start is not None:
            tokens, mask = row.tokens, [i >= row.answer_start for i in range(len(row.tokens))]
        else:
            try:
                tokens, mask = encode(tokenizer, row.messages, eos=eos)
            except ValueError as error:
                refused.append(str(error))
                continue
        tokens_T, mask_T = torch.tensor(tokens[: data.max_length]), torch.tensor(mask[: data.max_length])
        if int(mask_T.sum()) >= 2:
            found.append(Document(messages_id(row.messages), tokens_T, mask_T))
    if refused:
        print(f"{split}: {len(refused)} of {len(rows)} conversations left out; the first: {refused[0]}", file=sys.stderr)
    if not found:
        fix = "" if split == "train" else f", or raise data.{split}_share"
        raise RecipeError(
            f"none of {len(rows)} conversations is in the {split} split with two answer tokens or more; add prompts{fix}"
        )
    return found


def data_fingerprint(docs: list[Document]) -> str:
    """A short digest of documents: their tokens and masks, in order."""
    digest = hashlib.sha256()
    for document in docs:
        digest.update(document.tokens_T.numpy().tobytes() + document.loss_mask_T.numpy().tobytes())
    return digest.hexdigest()[:16]


def repeated_share(answers: Iterable[list[int]], *, n: int = 8) -> float:
    """Share of the n-grams of all answers that occurred before in the same answer: a model that loops flatters acceptance."""
    repeated = total = 0
    for tokens in answers:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / max(total, 1)
