"""From rows to documents: tokenised once, in several processes, and kept on disk, so that a set may be larger than memory.

    rows (data/sources.py) -> conversations (rows.py) -> text and answers (chat.py) -> documents, mapped from disk

A row becomes documents, or is refused with its place and the reason; none is dropped without a word.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, Features, List, Value, load_from_disk

from data.batch import Document
from data.chat import Chat, Encoded, Layout, Refused
from data.conversations import DataConfig, Split, answers_path, data_folder, read_prompts, split_of, synthesised_path
from data.rows import BadRow, to_conversation
from data.sources import Leaks, Refusals, Row, Source, check_share, parse, rows, say, times, version
from recipes.load import RecipeError, to_plain

BATCH = 128
"""Rows that a process tokenises at once."""

TOO_SHORT = "an answer with fewer than 2 tokens within data.max_length"
LEFT_OUT = ("cut by data.answers.max_tokens", "an evaluation prompt", "no longer among the prompts", TOO_SHORT)
"""Reasons to leave a row out that are nobody's fault."""

ROWS = Features(
    {**{name: Value("string") for name in ("where", "text", "error")}, "weight": Value("float32"), "own": Value("bool")}
)
"""own: a row of answers.jsonl, with what regeneration wrote there."""
DOCUMENTS = Features(
    {
        **{name: Value("string") for name in ("id", "split", "where", "reason", "error")},
        "tokens": List(Value("int32")),
        "spans": List(Value("int32")),
        "length": Value("int32"),
        "cut": Value("bool"),
        "greedy": Value("bool"),
    }
)


class Documents(Sequence[Document]):
    """Documents in an order that depends on their content only; tokens are read from disk as they are asked for."""

    def __init__(self, table: Dataset) -> None:
        self.table = table.select_columns(["id", "tokens", "spans", "greedy"]).with_format("numpy")
        self.places = table.select_columns(["where"])
        self.lengths: list[int] = _column(table, "length").tolist()
        self.cut: list[bool] = _column(table, "cut").tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def where(self, index: int) -> str:
        """The place of a document's row in its file."""
        return str(self.places[index]["where"])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self.table[index]
        tokens_T = torch.from_numpy(row["tokens"].astype(np.int64))
        mask_T = torch.zeros(len(tokens_T), dtype=torch.bool)
        for start, end in row["spans"].reshape(-1, 2).tolist():
            mask_T[start:end] = True
        return Document(str(row["id"]), tokens_T, mask_T, bool(row["greedy"]))

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
        columns = (batch[name] for name in ("where", "text", "error", "weight", "own"))
        for where, text, error, weight, own in zip(*columns, strict=True):
            try:
                common, documents = self.read(Row(where, text, error), weight, own=own)
            except Refused as problem:
                found.append({"where": where, "reason": problem.reason, "error": str(problem)})
                continue
            if documents and isinstance(documents[0], Layout):
                waiting.append((common, documents))
            else:
                found += self.finish(common, documents)
        tokenised = iter(self.chat.tokenize([layout for _, layouts in waiting for layout in layouts]))
        for common, layouts in waiting:
            found += self.finish(common, [next(tokenised) for _ in layouts])
        return {name: [row.get(name) for row in found] for name in DOCUMENTS}

    def read(self, row: Row, weight: float, *, own: bool) -> tuple[dict[str, Any], list[Any]]:
        """What a row's documents have in common, and these: as tokens, where the target wrote them, else still as text."""
        content = parse(row)
        conversation = to_conversation(content)
        if self.leaks.has(conversation):
            raise BadRow("an evaluation prompt", "it is in data.evaluation")
        if own:
            self.check_own(content)
        id = conversation.id
        common = {"id": id, "where": row.where, "split": split_of(conversation, self.data), "times": times(id, weight)}
        common["greedy"] = own and "documents" in content and content.get("sampling", {}).get("temperature") == 0
        if own and "documents" in content:
            return common, [Encoded(d["tokens"], [(start, end) for start, end in d["spans"]]) for d in content["documents"]]
        if conversation.text is not None:
            return common, [Layout(conversation.text, [(0, len(conversation.text))])]
        layouts = self.chat.lay_out(conversation.messages, conversation.tools)
        if not layouts:
            raise BadRow("no answer")
        return common, layouts

    def check_own(self, content: dict[str, Any]) -> None:
        """BadRow for an answer that is not of this recipe's target, template and prompts, or not whole."""
        kwargs = self.data.chat_template_kwargs
        if content.get("target", self.target) != self.target:
            raise BadRow("answered by another target", f"its fingerprint is {content['target']}, this recipe's {self.target}")
        if content.get("chat_template_kwargs", kwargs) != kwargs:
            raise BadRow("asked with other data.chat_template_kwargs", f"with {content['chat_template_kwargs']}")
        if self.asked is not None and "key" in content and content["key"] not in self.asked:
            raise BadRow("no longer among the prompts")
        if content.get("finish_reason") == "length" and not self.data.keep_truncated:
            raise BadRow("cut by data.answers.max_tokens")

    def finish(self, common: dict[str, Any], documents: list[Encoded | Refused]) -> list[dict[str, Any]]:
        """The documents of one row, cut to length, and those that nothing is left of; or why it has none."""
        for document in documents:
            if isinstance(document, Refused):
                return [{"where": common["where"], "reason": document.reason, "error": str(document)}]
        found: list[dict[str, Any]] = []
        for part, document in enumerate(document for document in documents if isinstance(document, Encoded)):
            short = document.cut(self.data.max_length)
            if short.num_supervised < 2:
                error = f"{TOO_SHORT}: {len(document.tokens)} tokens"
                found.append({"where": common["where"], "reason": TOO_SHORT, "error": error})
                continue
            row = {
                **common,
                "tokens": np.array(short.tokens, dtype=np.int32),
                "spans": [border for span in short.spans for border in span],
                "length": len(short.tokens),
                "cut": len(short.tokens) < len(document.tokens),
            }
            suffix = f"-{part}" if part else ""
            found += [{**row, "id": common["id"] + suffix + (f"+{again}" if again else "")} for again in range(common["times"])]
        return found


def _column(table: Dataset, name: str) -> Any:
    """A column of small values as a numpy array; the others are not read."""
    return table.select_columns([name]).with_format("numpy")[:][name]


def open_documents(data: DataConfig, name: str, *, chat: Chat, target: str) -> "DocumentSet":
    """The documents of the recipe ``name``: as they lie on disk, or made now. target: the target's fingerprint."""
    if not answers_path(name).is_file() and (data.prompts is not None or not data.answered):
        first = "" if data.prompts is not None or synthesised_path(name).is_file() else "python data/synthesize.py <recipe>, then "
        raise RecipeError(f"{answers_path(name)} does not exist; make it with: {first}python data/regenerate.py <recipe>")
    folder = data_folder(name) / "documents" / _fingerprint(data, name, chat=chat, target=target)
    if not folder.is_dir():
        _make(data, name, chat=chat, target=target, folder=folder)
    found = DocumentSet(load_from_disk(str(folder / "table")), **json.loads((folder / "summary.json").read_text()), folder=folder)
    for line in found.left_out:
        say(f"left out: {line}")
    check_share(found.bad, found.num_rows, found.left_out, data.max_bad_share, listed_in=data_folder(name) / "refused.jsonl")
    return found


def prepared_tokens(name: str) -> tuple[int, float] | None:
    """Tokens of the recipe's training split, as tokenised last, and the share of all that are supervised; None before that."""
    made = sorted((data_folder(name) / "documents").glob("*/table"), key=lambda folder: folder.stat().st_mtime)
    if not made:
        return None
    table = load_from_disk(str(made[-1]))
    lengths, splits = _column(table, "length"), _column(table, "split")
    bounds = table.data.column("spans").combine_chunks().flatten().to_numpy()
    return int(lengths[splits == "train"].sum()), float((bounds[1::2] - bounds[::2]).sum() / lengths.sum())


class DocumentSet(NamedTuple):
    """All splits. num_rows: that they were made of; bad: of these, not usable; left_out: a line for each reason."""

    table: Dataset
    num_rows: int
    bad: int
    left_out: list[str]
    folder: Path

    def sizes(self) -> dict[str, int]:
        """Documents of each split."""
        return {split: int((_column(self.table, "split") == split).sum()) for split in ("train", "validation", "test")}

    def split(self, split: Split) -> Documents:
        """The documents of one split; RecipeError where there are none."""
        (chosen,) = np.nonzero(_column(self.table, "split") == split)
        if not len(chosen):
            fix = ", or lower data.test_share and data.validation_share" if split == "train" else f", or raise data.{split}_share"
            raise RecipeError(f"none of {len(self.table)} documents is in the {split} split; add prompts{fix}")
        return Documents(self.table.select(chosen))


def _fingerprint(data: DataConfig, name: str, *, chat: Chat, target: str) -> str:
    """Of all that decides what the documents are: the rows' sources, the target with its template, and the recipe's settings."""
    settings = to_plain([data.prompts, data.answered, data.evaluation, data.keep_truncated, data.max_length])
    settings += [data.test_share, data.validation_share, target, chat.template, chat.kwargs, sorted(chat.eos), sorted(DOCUMENTS)]
    sources = (*(data.prompts or ()), *data.answered, *data.evaluation)
    own = [Source(str(path)) for path in (answers_path(name), synthesised_path(name)) if path.is_file()]
    versions = [version(source) for source in (*own, *sources)]
    return hashlib.sha256(json.dumps([settings, versions], sort_keys=True).encode()).hexdigest()[:16]


def _make(data: DataConfig, name: str, *, chat: Chat, target: str, folder: Path) -> None:
    """Makes the documents aside, then renames them into place, unless another process was first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = [Source(str(answers_path(name)))] if answers_path(name).is_file() else []
    asked, leaks = None, Leaks.of(data.evaluation)
    if own and (data.prompts is not None or synthesised_path(name).is_file()):
        asked = frozenset(id for id, _ in read_prompts(data, name, leaks))
    maker = Maker(data, chat, target=target, leaks=leaks, asked=asked)

    def every_row() -> Iterator[dict[str, Any]]:
        num_own = 0
        for source in (*own, *data.answered):
            for row in rows(source):
                num_own += source in own
                yield {**row._asdict(), "weight": source.weight, "own": source in own}
        if asked is not None and num_own < len(asked):
            say(f"{len(asked) - num_own} of {len(asked)} prompts have no answer yet; python data/regenerate.py <recipe> goes on")

    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as aside_name:
        aside = Path(aside_name)
        raw = _gathered(every_row(), aside / "rows.arrow", of=[source.path for source in (*own, *data.answered)])
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
        table, summary = _settle(made, num_rows=len(raw), listed_in=data_folder(name) / "refused.jsonl")
        if not len(table):
            raise RecipeError(f"no row of {name} can be trained on: {'; '.join(summary['left_out'][:5])}")
        ready = aside / "ready"
        table.save_to_disk(str(ready / "table"))
        (ready / "summary.json").write_text(json.dumps(summary))
        try:
            ready.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def _gathered(found: Iterator[dict[str, Any]], path: Path, *, of: list[str]) -> Dataset:
    """All rows in an Arrow file; RecipeError where there is none. of: their sources."""
    schema, num_rows = ROWS.arrow_schema, 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        while some := list(islice(found, 1024)):
            writer.write_batch(pa.RecordBatch.from_pylist(some, schema=schema))
            num_rows += len(some)
    if not num_rows:
        raise RecipeError(f"there is no row in {', '.join(of)}; regenerate answers, or name conversations in data.answered")
    return Dataset.from_file(str(path))


def _settle(made: Dataset, *, num_rows: int, listed_in: Path) -> tuple[Dataset, dict[str, Any]]:
    """The documents without what was refused or stands there twice, in their order; and what DocumentSet says beside them."""
    refused = made.filter(lambda reasons: [reason is not None for reason in reasons], input_columns="reason", batched=True)
    refusals = Refusals(num_rows, listed_in=listed_in)
    for row in refused.select_columns(["where", "reason", "error"]):
        refusals.add(row["where"], row["reason"], row["error"], harmless=row["reason"] in LEFT_OUT)
    # In an order that depends on what is said only; a conversation that stands there twice counts once, the target's own first.
    ids = np.array(["" if id is None else id for id in _column(made, "id").tolist()], dtype=np.str_)
    unique, first = np.unique(ids, return_index=True)
    table = made.select(first[unique != ""])
    lines = refusals.lines()
    if twice := len(made) - len(refused) - len(table):
        lines.append(f"{twice} x said before, word for word")
    if num_cut := int(_column(table, "cut").sum()) if len(table) else 0:
        lines.append(f"the end of {num_cut} documents, behind data.max_length")
    return table, {"num_rows": num_rows, "bad": refusals.bad, "left_out": lines}
