"""Where rows come from: local files and data sets of the Hugging Face Hub, one row after the other, each with its place.

Nothing is held in memory but the row at hand, so a source may be larger than that.
"""

import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from data.rows import BadRow, Conversation, to_conversation
from recipes.load import RecipeError, locate

SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")


@dataclass(frozen=True)
class Source:
    """A source of rows; a recipe may name it by its path alone.

    path: a file, a folder of such files, or a data set's id on the Hub. subset, split, revision: of an id on the Hub. weight: the
    share of its conversations that is used, by their hash; 2 uses each twice. limit: rows to read at most.
    """

    path: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    weight: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise RecipeError(f"the weight of {self.path} is {self.weight}; give more than 0, or leave the source out")


class Row(NamedTuple):
    """A row before it is looked at: its place ("file, line 7"), and its JSON, or what is wrong with it already."""

    where: str
    text: str
    error: str | None = None


def rows(source: Source) -> Iterator[Row]:
    """The rows of a source, in order; RecipeError where it does not exist, or cannot be read on."""
    found = _rows(source)
    for count, row in enumerate(found):
        if source.limit is not None and count >= source.limit:
            return
        yield row


def _rows(source: Source) -> Iterator[Row]:
    path = locate(Path(source.path))
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        if not files:
            raise RecipeError(f"{path} has no file that ends with {', '.join(SUFFIXES)}")
    elif path.is_file():
        files = [path]
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", source.path) and not source.path.endswith(SUFFIXES):
        yield from _hub_rows(source)
        return
    else:
        raise RecipeError(f"{source.path} does not exist; give a file ({', '.join(SUFFIXES)}), a folder, or an id on the Hub")
    for file in files:
        if file.name.endswith(".parquet"):
            yield from _parquet_rows(file)
        elif file.name.endswith((".jsonl", ".jsonl.gz")):
            yield from _json_lines(file)
        elif file.name.endswith((".json", ".json.gz")):
            yield from _json_array(file)
        else:
            raise RecipeError(f"{file} ends with none of {', '.join(SUFFIXES)}")


def _open(file: Path) -> IO[bytes]:
    return gzip.open(file) if file.name.endswith(".gz") else file.open("rb")  # type: ignore[return-value]


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of a file; RecipeError where a compressed one is cut short or broken."""
    number = 0
    try:
        with _open(file) as stream:
            for number, line in enumerate(stream, start=1):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (EOFError, gzip.BadGzipFile, OSError) as error:
        raise RecipeError(f"{file}, behind line {number}: {error}; the file is cut short or broken, fetch it again") from None


def _json_lines(file: Path) -> Iterator[Row]:
    for number, line in _lines(file):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            yield Row(where, line.decode())
        except UnicodeDecodeError:
            yield Row(where, "", "not valid UTF-8")


def _json_array(file: Path) -> Iterator[Row]:
    """The objects of a file that is one JSON array, decoded one by one; a place is the line an object begins in."""
    decoder, buffer, line, opened = json.JSONDecoder(), "", 1, False
    lines = _lines(file)
    more = True
    while True:
        stripped = buffer.lstrip(" \t\r\n" + ("," if opened else ""))
        line += buffer[: len(buffer) - len(stripped)].count("\n")
        buffer = stripped
        if not opened and buffer:
            if buffer[0] != "[":
                raise RecipeError(f"{file}, line {line}: expected an array of rows; name a file of one row per line .jsonl")
            buffer, opened = buffer[1:], True
            continue
        if opened and buffer.startswith("]"):
            return
        try:
            _, end = decoder.raw_decode(buffer)
            yield Row(f"{file}, line {line}", buffer[:end])
            line += buffer[:end].count("\n")
            buffer = buffer[end:]
        except json.JSONDecodeError as error:
            if not more:
                raise RecipeError(
                    f"{file}, line {line + error.doc[: error.pos].count(chr(10))}: not valid JSON: {error.msg}"
                ) from None
            # As much again as is there already: an object of a megabyte is not parsed for each of its lines anew.
            wanted = max(len(buffer), 1 << 16)
            parts, size = [buffer], 0
            for number, raw in lines:
                try:
                    parts.append(raw.decode())
                except UnicodeDecodeError:
                    raise RecipeError(f"{file}, line {number}: not valid UTF-8") from None
                size += len(raw)
                if size >= wanted:
                    break
            else:
                more = False
            buffer = "".join(parts)


def _parquet_rows(file: Path) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        found = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        for number, row in enumerate(found, start=1):
            yield Row(f"{file}, row {number}", json.dumps(row, ensure_ascii=False, default=str))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None


def _hub_rows(source: Source) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        found = load_dataset(source.path, source.subset, split=source.split, revision=source.revision, streaming=True)
        for number, row in enumerate(found, start=1):
            yield Row(f"{source.path}, row {number}", json.dumps(row, ensure_ascii=False, default=str))
    except (OSError, ValueError, ConnectionError) as error:
        raise RecipeError(f"{source.path} is no file here, and cannot be read from the Hub: {str(error).splitlines()[0]}") from None


def parse(row: Row) -> dict[str, Any]:
    """The object in a row; BadRow with the reason where there is none."""
    if row.error is not None:
        raise BadRow(row.error)
    try:
        content = json.loads(row.text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise BadRow("not valid JSON", error.msg) from None
    except RecursionError:
        raise BadRow("nested too deeply") from None
    if not isinstance(content, dict):
        raise BadRow("not an object", type(content).__name__)
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise BadRow("a key stands twice in an object", twice)
    return found


class Refusals:
    """Counts rows, and those that were left out by reason; the first of each kind is kept to be shown.

    harmless: left out for a reason that is no fault of the row's.
    """

    def __init__(self, total: int = 0) -> None:
        self.total, self.bad = total, 0
        self.reasons: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, where: str, reason: str, text: str, *, harmless: bool = False) -> None:
        """A row that was left out."""
        self.bad += not harmless
        self.reasons[reason] += 1
        self.examples.setdefault(reason, f"{where}: {text}")

    def lines(self) -> list[str]:
        """One line per reason, the most frequent first."""
        return [f"{count} x {reason}; the first: {self.examples[reason]}" for reason, count in self.reasons.most_common()]

    def check(self, max_share: float, *, listed_in: Path | None = None) -> None:
        """RecipeError where more than max_share of the rows were bad."""
        if self.bad > max_share * self.total:
            where = f" (all in {listed_in})" if listed_in else ""
            raise RecipeError(
                f"{self.bad} of {self.total} rows cannot be used, more than data.max_bad_share = {max_share}{where}: "
                + "; ".join(self.lines())
            )


def conversations(sources: Iterable[Source], refusals: Refusals) -> Iterator[tuple[str, Conversation]]:
    """(place, conversation) of all rows of all sources that are one, as far as their source's weight takes them."""
    for source in sources:
        for row in rows(source):
            refusals.total += 1
            try:
                conversation = to_conversation(parse(row))
            except BadRow as error:
                refusals.add(row.where, error.reason, str(error))
                continue
            if times(conversation.id, source.weight):
                yield row.where, conversation


def times(id: str, weight: float) -> int:
    """How often a conversation is used: weight's whole part, and once more for a share of all ids that is its fraction."""
    whole = int(weight)
    # Another hash than the one that splits: else a small share would be all test.
    share = int.from_bytes(hashlib.sha256(f"weight {id}".encode()).digest()[:6], "big") / 2**48
    return whole + (share < weight - whole)


class Leaks:
    """Prompts that are to be evaluated on, and so must not be trained on: found by what is left of them in small letters without
    punctuation and white space."""

    def __init__(self, prompts: Iterable[str]) -> None:
        self.digests = frozenset(map(_digest, prompts))

    @classmethod
    def of(cls, sources: Iterable[Source]) -> "Leaks":
        """The first user's turns of evaluation sets."""
        refusals = Refusals()
        found = [
            next(message["content"] for message in conversation.messages if message["role"] == "user")
            for _, conversation in conversations(sources, refusals)
            if conversation.messages
        ]
        refusals.check(0.0)
        return cls(found)

    def has(self, conversation: Conversation) -> bool:
        """Whether a user asks one of them in any turn."""
        said = (message["content"] for message in conversation.messages if message["role"] == "user")
        return bool(self.digests) and any(_digest(text) in self.digests for text in said)


def _digest(text: str) -> bytes:
    return hashlib.blake2b("".join(re.findall(r"\w+", text.lower())).encode(), digest_size=8).digest()
