"""Where rows come from: local files and data sets of the Hugging Face Hub, one row after the other, each with its place.

Nothing is held in memory but the row at hand, so a source may be larger than that.
"""

import codecs
import gzip
import hashlib
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
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
    except (EOFError, zlib.error, OSError) as error:
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
    decoder, chunks = json.JSONDecoder(), _text_chunks(file)
    buffer, at, line, opened, more = "", 0, 1, False, True
    while True:
        begin = _SPACE[opened].match(buffer, at)
        assert begin is not None
        line += buffer.count("\n", at, begin.end())
        at = begin.end()
        if at < len(buffer) and not opened:
            if buffer[at] != "[":
                raise RecipeError(f"{file}, line {line}: expected an array of rows; name a file of one row per line .jsonl")
            at, opened = at + 1, True
            continue
        if opened and buffer.startswith("]", at):
            return
        problem = None
        try:
            _, end = decoder.raw_decode(buffer, at)
        except RecursionError:
            problem = (line, "nested too deeply")
        except json.JSONDecodeError as error:
            problem = (line + buffer.count("\n", at, error.pos), error.msg)
        except ValueError as error:
            problem = (line, str(error))
        # What ends with the buffer, as a number may, can go on behind it.
        if problem is None and (end < len(buffer) or not more):
            yield Row(f"{file}, line {line}", buffer[at:end])
            line += buffer.count("\n", at, end)
            at = end
            continue
        if not more:
            where, what = problem or (line, "cut short")
            raise RecipeError(f"{file}, line {where}: not valid JSON: {what}")
        # As much again as is there already: an object of a megabyte is not parsed for each of its chunks anew.
        parts, wanted = [buffer[at:]], len(buffer) - at
        while wanted >= 0 and more:
            chunk = next(chunks, None)
            more = chunk is not None
            parts.append(chunk or "")
            wanted -= len(chunk or "")
        buffer, at = "".join(parts), 0


_SPACE = {False: re.compile(r"[ \t\r\n]*"), True: re.compile(r"[ \t\r\n,]*")}


def _text_chunks(file: Path, size: int = 1 << 16) -> Iterator[str]:
    """The text of a file, piece by piece, without a byte order mark; RecipeError as for its lines."""
    decoder, line, last = codecs.getincrementaldecoder("utf-8-sig")(), 1, False
    try:
        with _open(file) as stream:
            while not last:
                raw = stream.read(size)
                last = not raw
                text = decoder.decode(raw, final=last)
                line += text.count("\n")
                yield text
    except UnicodeDecodeError:
        raise RecipeError(f"{file}, line {line} or soon after: not valid UTF-8") from None
    except (EOFError, zlib.error, OSError) as error:
        raise RecipeError(f"{file}, behind line {line}: {error}; the file is cut short or broken, fetch it again") from None


def _parquet_rows(file: Path) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        found = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        for number, row in enumerate(found, start=1):
            yield Row(f"{file}, row {number}", _as_json(row))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None


def _hub_rows(source: Source) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        found = load_dataset(source.path, source.subset, split=source.split, revision=source.revision, streaming=True)
        for number, row in enumerate(found, start=1):
            yield Row(f"{source.path}, row {number}", _as_json(row))
    except (OSError, ValueError, ConnectionError) as error:
        raise RecipeError(f"{source.path} is no file here, and cannot be read from the Hub: {str(error).splitlines()[0]}") from None


def _as_json(row: Any) -> str:
    """A table's row as JSON, without its nulls: a table fills in what another row has, as a tool's argument."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items() if inner is not None}
        return [filled(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(filled(row), ensure_ascii=False, default=str)


def version(source: Source) -> str:
    """What changes when the source does: a hash of its files, or the revision of a data set on the Hub."""
    path = locate(Path(source.path))
    digest = hashlib.sha256()
    if not path.exists():
        from huggingface_hub import HfApi

        try:
            return str(HfApi().dataset_info(source.path, revision=source.revision).sha)
        except (OSError, ValueError):  # not on the Hub, or not to be reached: reading it will say so, or find it in the cache
            return "unknown"
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def parse(row: Row) -> dict[str, Any]:
    """The object in a row; BadRow with the reason where there is none."""
    if row.error is not None:
        raise BadRow(row.error)
    try:
        content = json.loads(row.text, object_pairs_hook=_unique)
    except BadRow:
        raise
    except RecursionError:
        raise BadRow("nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits is one, too
        at = f"{error.msg.removesuffix(' at')}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise BadRow("not valid JSON", at) from None
    if "\\ud" in row.text.lower():
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadRow("half a surrogate pair") from None
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
    """Counts rows, and those that were left out by reason; the first of each kind is kept to be shown, all are listed in a file,
    which is begun anew.

    harmless: left out for a reason that is no fault of the row's.
    """

    def __init__(self, total: int = 0, *, listed_in: Path | None = None) -> None:
        self.total, self.bad, self.listed_in = total, 0, listed_in
        self.reasons: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        if listed_in is not None:
            listed_in.unlink(missing_ok=True)

    def add(self, where: str, reason: str, text: str, *, harmless: bool = False) -> None:
        """A row that was left out."""
        self.bad += not harmless
        self.reasons[reason] += 1
        self.examples.setdefault(reason, f"{where}: {text}")
        if self.listed_in is not None:
            self.listed_in.parent.mkdir(parents=True, exist_ok=True)
            with self.listed_in.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"where": where, "reason": reason, "error": text}, ensure_ascii=False) + "\n")

    def lines(self) -> list[str]:
        """One line per reason, the most frequent first."""
        return [f"{count} x {reason}; the first: {self.examples[reason]}" for reason, count in self.reasons.most_common()]

    def check(self, max_share: float, *, listed_in: Path | None = None) -> None:
        """RecipeError where more than max_share of the rows were bad."""
        check_share(self.bad, self.total, self.lines(), max_share, listed_in=listed_in or self.listed_in)


def check_share(bad: int, total: int, lines: list[str], max_share: float, *, listed_in: Path | None) -> None:
    """RecipeError where more than max_share of all rows were bad; lines say why."""
    if bad > max_share * total:
        where = f" (all in {listed_in})" if listed_in else ""
        raise RecipeError(
            f"{bad} of {total} rows cannot be used, more than data.max_bad_share = {max_share}{where}; mend them, or raise it: "
            + "; ".join(lines[:3])
        )


@cache
def say(line: str) -> None:
    """Says a line on stderr, once, however often the rows are read."""
    print(line, file=sys.stderr)


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
        refusals, found = Refusals(), []
        for where, conversation in conversations(sources, refusals):
            if conversation.messages:
                found.append(next(message["content"] for message in conversation.messages if message["role"] == "user"))
            else:
                refusals.add(where, "plain text asks nothing", "an evaluation set needs prompts")
        if refusals.bad:
            raise RecipeError(f"data.evaluation has rows that cannot be used: {'; '.join(refusals.lines()[:5])}")
        return cls(found)

    def has(self, conversation: Conversation) -> bool:
        """Whether a user asks one of them in any turn."""
        said = (message["content"] for message in conversation.messages if message["role"] == "user")
        return bool(self.digests) and any(_digest(text) in self.digests for text in said)


def _digest(text: str) -> bytes:
    return hashlib.blake2b("".join(re.findall(r"\w+", text.lower())).encode(), digest_size=8).digest()
