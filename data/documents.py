"""From rows to documents: tokenised once, in several processes, and kept on disk, so that a set may be larger than memory.

    rows (data/sources.py) -> conversations (rows.py) -> text and answers (chat.py) -> documents, mapped from disk

A row becomes documents, or is refused with its place and the reason; none is dropped without a word.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset, Features, List, Value, load_from_disk

from data.batch import Document
from data.chat import Chat, Encoded, Layout, Refused
from data.conversations import DataConfig, Split, answers_path, data_folder, read_prompts, split_of
from data.rows import BadRow, to_conversation
from data.sources import Leaks, Refusals, Row, Source, parse, rows, times
from recipes.load import RecipeError, locate, to_plain

BATCH = 128
"""Rows that a process tokenises at once."""

TOO_SHORT = "fewer than 2 supervised tokens within data.max_length"
LEFT_OUT = ("cut by data.answers.max_tokens", "an evaluation prompt", "no longer among the prompts", TOO_SHORT)
"""Reasons to leave a row out that are nobody's fault."""

ROWS = Features({"where": Value("string"), "text": Value("string"), "error": Value("string"), "weight": Value("float32")})
DOCUMENTS = Features(
    {
        **{name: Value("string") for name in ("id", "split", "where", "reason", "error")},
        "tokens": List(Value("int32")),
        "spans": List(Value("int32")),
    }
)


class Documents(Sequence[Document]):
    """Documents in an order that depends on their content only; tokens are read from disk as they are asked for."""

    def __init__(self, table: Dataset) -> None:
        self.table = table.select_columns(["id", "tokens", "spans"]).with_format("numpy")
        self.lengths: list[int] = [len(tokens) for tokens in self.table.with_format("arrow")["tokens"]]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self.table[index]
        tokens_T = torch.from_numpy(row["tokens"].astype(np.int64))
        mask_T = torch.zeros(len(tokens_T), dtype=torch.bool)
        for start, end in row["spans"].reshape(-1, 2).tolist():
            mask_T[start:end] = True
        return Document(str(row["id"]), tokens_T, mask_T)

    def __iter__(self) -> Iterator[Document]:
        return (self[i] for i in range(len(self)))


class Maker:
    """Makes documents of rows; what each process gets."""

    def __init__(self, data: DataConfig, chat: Chat, *, target: str, leaks: Leaks, asked: frozenset[str] | None) -> None:
        self.data, self.chat, self.target, self.leaks, self.asked = data, chat, target, leaks, asked

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Rows in, documents and refusals out, a batch of columns each."""
        found: list[dict[str, Any]] = []
        waiting: list[tuple[dict[str, Any], list[Layout]]] = []
        for where, text, error, weight in zip(batch["where"], batch["text"], batch["error"], batch["weight"], strict=True):
            try:
                common, documents = self.read(Row(where, text, error), weight)
            except (BadRow, Refused) as problem:
                reason = problem.reason if isinstance(problem, BadRow) else str(problem)
                found.append({"where": where, "reason": reason, "error": str(problem)})
                continue
            if documents and isinstance(documents[0], Layout):
                waiting.append((common, documents))
            else:
                found += self.finish(common, documents)
        tokenised = iter(self.chat.tokenize([layout for _, layouts in waiting for layout in layouts]))
        for common, layouts in waiting:
            found += self.finish(common, [next(tokenised) for _ in layouts])
        return {name: [row.get(name) for row in found] for name in DOCUMENTS}

    def read(self, row: Row, weight: float) -> tuple[dict[str, Any], list[Any]]:
        """What a row's documents have in common, and these: as tokens, where the target wrote them, else still as text."""
        content = parse(row)
        if content.get("target", self.target) != self.target:
            raise BadRow("answered by another target", f"its fingerprint is {content['target']}, this recipe's {self.target}")
        if self.asked is not None and "key" in content and content["key"] not in self.asked:
            raise BadRow("no longer among the prompts")
        if content.get("finish_reason") == "length" and not self.data.keep_truncated:
            raise BadRow("cut by data.answers.max_tokens")
        conversation = to_conversation(content)
        if self.leaks.has(conversation):
            raise BadRow("an evaluation prompt")
        id = conversation.id
        common = {"id": id, "where": row.where, "split": split_of(conversation, self.data), "times": times(id, weight)}
        if "documents" in content:
            return common, [Encoded(d["tokens"], [(start, end) for start, end in d["spans"]]) for d in content["documents"]]
        if conversation.text is not None:
            return common, [Layout(conversation.text, [(0, len(conversation.text))])]
        layouts = self.chat.lay_out(conversation.messages, conversation.tools)
        if not layouts:
            raise BadRow("no answer")
        return common, layouts

    def finish(self, common: dict[str, Any], documents: list[Encoded | Refused]) -> list[dict[str, Any]]:
        """The documents of one row, cut to length; or why it has none."""
        for document in documents:
            if isinstance(document, Refused):
                return [{"where": common["where"], "reason": str(document), "error": str(document)}]
        cut = [document.cut(self.data.max_length) for document in documents if isinstance(document, Encoded)]
        usable = [document for document in cut if document.num_supervised >= 2]
        if not usable:
            return [{"where": common["where"], "reason": TOO_SHORT, "error": TOO_SHORT}]
        found = []
        for again in range(common["times"]):
            for part, document in enumerate(usable):
                suffix = f"-{part}" if part else ""
                spans = [border for span in document.spans for border in span]
                id = common["id"] + suffix + (f"+{again}" if again else "")
                found.append({**common, "id": id, "tokens": document.tokens, "spans": spans})
        return found


def open_documents(data: DataConfig, name: str, *, chat: Chat, target: str) -> "DocumentSet":
    """The documents of the recipe ``name``: as they lie on disk, or made now. target: the target's fingerprint."""
    if not answers_path(name).is_file() and not data.answered:
        raise RecipeError(f"{answers_path(name)} does not exist; make it with: python data/regenerate.py <recipe>")
    fingerprint = _fingerprint(data, name, chat=chat, target=target)
    folder = data_folder(name) / "documents" / fingerprint
    if not folder.is_dir():
        _make(data, name, chat=chat, target=target, folder=folder)
    return DocumentSet(load_from_disk(str(folder / "table")), json.loads((folder / "refused.json").read_text()), folder)


class DocumentSet(NamedTuple):
    """All splits. refused: a line for each reason that rows were left out for."""

    table: Dataset
    refused: list[str]
    folder: Path

    def split(self, split: Split) -> Documents:
        """The documents of one split; RecipeError where there are none."""
        splits = np.array(self.table.with_format("arrow")["split"])
        (chosen,) = np.nonzero(splits == split)
        if not len(chosen):
            fix = "" if split == "train" else f", or raise data.{split}_share"
            raise RecipeError(f"none of {len(self.table)} documents is in the {split} split; add prompts{fix}")
        return Documents(self.table.select(chosen))


def _fingerprint(data: DataConfig, name: str, *, chat: Chat, target: str) -> str:
    """Of all that decides what the documents are: the rows' files, the target with its template, and the recipe's settings."""
    digest = hashlib.sha256()
    settings = {
        key: to_plain(getattr(data, key))
        for key in ("prompts", "answered", "evaluation", "keep_truncated", "max_length", "test_share", "validation_share")
    }
    digest.update(json.dumps([settings, target, chat.template, chat.kwargs, sorted(chat.eos)], sort_keys=True).encode())
    named = [locate(Path(source.path)) for source in (*(data.prompts or ()), *data.answered, *data.evaluation)]
    for path in [answers_path(name), *named]:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.is_file():
                with file.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def _make(data: DataConfig, name: str, *, chat: Chat, target: str, folder: Path) -> None:
    """Makes the documents aside, then renames them into place."""
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    asked = None
    if data.prompts is not None and answers_path(name).is_file():
        asked = frozenset(id for id, _ in read_prompts(data, name))
    maker = Maker(data, chat, target=target, leaks=Leaks.of(data.evaluation), asked=asked)
    own = [Source(str(answers_path(name)))] if answers_path(name).is_file() else []

    def every_row() -> Iterator[dict[str, Any]]:
        for source in (*own, *data.answered):
            for row in rows(source):
                yield {**row._asdict(), "weight": source.weight}

    if next(every_row(), None) is None:
        raise RecipeError(f"no row of {name} can be trained on: there is none")
    raw = Dataset.from_generator(every_row, features=ROWS, cache_dir=str(aside / "cache"), fingerprint="rows")
    num_proc = min(data.num_proc or os.cpu_count() or 1, max(1, len(raw) // BATCH))
    made = raw.map(
        maker,
        batched=True,
        batch_size=BATCH,
        num_proc=num_proc if num_proc > 1 else None,
        remove_columns=list(ROWS),
        features=DOCUMENTS,
        load_from_cache_file=False,
        new_fingerprint="documents",
        desc="tokenising",
    )
    table, lines = _settle(made, num_rows=len(raw), data=data, listed_in=data_folder(name) / "refused.jsonl")
    if not len(table):
        raise RecipeError(f"no row of {name} can be trained on: {'; '.join(lines)}")
    table.save_to_disk(str(aside / "table"))
    (aside / "refused.json").write_text(json.dumps(lines))
    shutil.rmtree(aside / "cache")
    folder.parent.mkdir(exist_ok=True)
    aside.rename(folder)


def _settle(made: Dataset, *, num_rows: int, data: DataConfig, listed_in: Path) -> tuple[Dataset, list[str]]:
    """The documents without what was refused or stands there twice, in their order; a line for each reason to leave rows out.

    RecipeError where too many rows are bad.
    """
    refused = made.filter(lambda reasons: [reason is not None for reason in reasons], input_columns="reason", batched=True)
    refusals = Refusals(num_rows)
    with listed_in.open("w", encoding="utf-8") as file:
        for row in refused.select_columns(["where", "reason", "error"]):
            refusals.add(row["where"], row["reason"], row["error"], harmless=row["reason"] in LEFT_OUT)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    # In an order that depends on what is said only; a conversation that stands there twice counts once, the target's own first.
    ids = np.array(made.with_format("arrow")["id"].to_pylist(), dtype=np.str_)
    unique, first = np.unique(ids, return_index=True)
    table = made.select(first[unique != "None"])
    lines = refusals.lines()
    if twice := len(made) - len(refused) - len(table):
        lines.append(f"{twice} x said before, word for word")
    for line in lines:
        print(f"left out: {line}", file=sys.stderr)
    refusals.check(data.max_bad_share, listed_in=listed_in)
    return table, lines
