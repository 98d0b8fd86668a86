"""Files of every kind, good and broken: each gives the right rows, or one line that says where and what."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset

from data.chat import Chat
from data.conversations import DataConfig
from data.documents import open_documents
from data.rows import BadRow
from data.sources import Leaks, Refusals, Source, conversations, parse, rows, times, version
from recipes.load import RecipeError
from tests.conftest import byte_tokenizer

GOOD = [{"prompt": f"q{i}", "response": "yes"} for i in range(3)]


def said(path: Path) -> list[str]:
    """What the users of all conversations say."""
    refusals = Refusals()
    found = [c.messages[0]["content"] for _, c in conversations([Source(str(path))], refusals)]
    refusals.check(0.0)
    return found


def lines(values: list[dict[str, str]]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def test_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(GOOD))
    (tmp_path / "b.json").write_text(json.dumps(GOOD, indent=1))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines(GOOD)))
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    Dataset.from_list(GOOD).to_parquet(tmp_path / "e.parquet")
    for file in sorted(tmp_path.iterdir()):
        assert said(file) == ["q0", "q1", "q2"], file
    assert said(tmp_path) == ["q0", "q1", "q2"] * 5, "a folder is all its files"
    assert [row.where for row in rows(Source(str(tmp_path / "b.json"), limit=2))] == [
        f"{tmp_path / 'b.json'}, line 2",
        f"{tmp_path / 'b.json'}, line 6",
    ]


def broken_gzip() -> bytes:
    """A file with some bytes in its middle turned over."""
    content = bytearray(gzip.compress(lines(GOOD * 2000)))
    for i in range(len(content) // 2, len(content) // 2 + 8):
        content[i] ^= 0xFF
    return bytes(content)


BROKEN: list[tuple[str, bytes, list[str] | str]] = [
    (
        "middle.jsonl",
        lines(GOOD[:1]) + b'{"prompt": \n' + lines(GOOD[1:]),
        "1 x not valid JSON; the first: {}, line 2: not valid JSON",
    ),
    ("encoding.jsonl", lines(GOOD[:1]) + '{"prompt": "käse"}\n'.encode("latin-1"), "1 x not valid UTF-8; the first: {}, line 2"),
    ("empty.jsonl", b"", []),
    ("nulls.jsonl", b'{"messages": [{"role": "user", "content": null}]}\n{"messages": [null]}\n{"prompt": null}\n', "3 of 3 rows"),
    ("long.jsonl", lines([{"prompt": "x" * 1_000_000}]), ["x" * 1_000_000]),
    ("windows.jsonl", lines(GOOD).replace(b"\n", b"\r\n"), ["q0", "q1", "q2"]),
    ("bom.jsonl", b"\xef\xbb\xbf" + lines(GOOD), ["q0", "q1", "q2"]),
    ("twice.jsonl", b'{"prompt": "a", "prompt": "b"}\n', "1 x a key stands twice in an object; the first: {}, line 1"),
    (
        "roles.jsonl",
        b'{"messages": [{"role": "narrator", "content": "x"}]}\n',
        '1 x unknown role; the first: {}, line 1: unknown role: "narrator"',
    ),
    ("short.jsonl.gz", gzip.compress(lines(GOOD * 2000))[:-60], "{}, behind line "),
    ("nogzip.jsonl.gz", lines(GOOD), "{}, behind line 0: Not a gzipped file"),
    ("flipped.jsonl.gz", broken_gzip(), "{}, behind line "),
    ("half-emoji.jsonl", b'{"prompt": "hi \\ud83d"}\n', "1 x half a surrogate pair; the first: {}, line 1"),
    ("whole-emoji.jsonl", b'{"prompt": "\\ud83d\\ude42"}\n', ["\U0001f642"]),
    ("digits.jsonl", b'{"prompt": ' + b"9" * 5000 + b"}\n", "1 x not valid JSON; the first: {}, line 1"),
    ("digits.json", b'[{"prompt": ' + b"9" * 5000 + b"}]", "{}, line 1: not valid JSON"),
    ("deep.json", b"[" + b"[" * 100_000 + b"]" * 100_000 + b"]", "{}, line 1: not valid JSON: nested too deeply"),
    ("one-line.json", json.dumps([{"prompt": f"q{i}"} for i in range(30_000)]).encode(), [f"q{i}" for i in range(30_000)]),
    ("open.json", b'[{"prompt": "a"}', "{}, line 1: not valid JSON"),
    ("encoding.json", '[{"prompt": "k\u00e4se"}]'.encode("latin-1"), "{}, line 1 or soon after: not valid UTF-8"),
    ("blank.jsonl", b"\n\n" + lines(GOOD) + b"\n  \n", ["q0", "q1", "q2"]),
    ("list.jsonl", b"[1]\n", "1 x not an object; the first: {}, line 1: not an object: list"),
    ("deep.jsonl", b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "1 x nested too deeply; the first: {}, line 1"),
    ("half.json", b'[\n{"prompt": "a"},\n{"prompt": \n', "{}, line 4: not valid JSON"),
    ("object.json", b'\n{"prompt": "a"}', "{}, line 2: expected an array of rows; name a file of one row per line .jsonl"),
    ("bom.json", b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), ["q0", "q1", "q2"]),
]


@pytest.mark.parametrize(("name", "content", "expected"), BROKEN, ids=[name for name, *_ in BROKEN])
def test_broken_files(name: str, content: bytes, expected: list[str] | str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    if isinstance(expected, list):
        assert said(path) == expected
        return
    with pytest.raises(RecipeError) as error:
        said(path)
    assert expected.format(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "content"), [(name, content) for name, content, expected in BROKEN if isinstance(expected, str)])
def test_broken_files_cost_training_one_line(name: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole of data/, with another source before it."""
    monkeypatch.chdir(tmp_path)
    Path("good.jsonl").write_bytes(lines(GOOD))
    Path(name).write_bytes(content)
    data = DataConfig(answered=(Source("good.jsonl"), Source(name)), test_share=0.0, validation_share=0.0)
    with pytest.raises(RecipeError, match=name):
        open_documents(data, "x", chat=Chat(byte_tokenizer(), {2}), target="t")


def test_nulls_that_a_table_fills_in(tmp_path: Path) -> None:
    """Parquet gives every row the keys of all: an argument that a call has not must not come as null."""
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": 1}, {"b": 2})]
    rows_in = [
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [call]}]}
        for call in calls
    ]
    Dataset.from_list(rows_in).to_parquet(tmp_path / "x.parquet")
    found = [c for _, c in conversations([Source(str(tmp_path / "x.parquet"))], Refusals())]
    assert [c.messages[1]["tool_calls"][0]["function"]["arguments"] for c in found] == [{"a": 1}, {"b": 2}]


def test_good_rows_around_bad_ones_are_kept(tmp_path: Path) -> None:
    """And those are counted: two of five are more than a tenth, less than a half."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines(GOOD[:1]) + b"{\n" + lines(GOOD[1:]) + b"[]\n")
    refusals = Refusals()
    assert len(list(conversations([Source(str(path))], refusals))) == 3
    refusals.check(0.5)
    with pytest.raises(
        RecipeError,
        match=r"2 of 5 rows cannot be used, more than data\.max_bad_share = 0\.1; mend them, or raise it: 1 x not valid",
    ):
        refusals.check(0.1)


def test_what_does_not_exist(tmp_path: Path) -> None:
    for name in ("no.jsonl", "no/such.jsonl"):
        with pytest.raises(RecipeError, match="does not exist; give a file"):
            list(rows(Source(str(tmp_path / name))))
    (tmp_path / "x.txt").write_text("hi")
    with pytest.raises(RecipeError, match=r"ends with none of \.jsonl"):
        list(rows(Source(str(tmp_path / "x.txt"))))
    (tmp_path / "none").mkdir()
    with pytest.raises(RecipeError, match="has no file that ends with"):
        list(rows(Source(str(tmp_path / "none"))))


def test_weights(tmp_path: Path) -> None:
    """A share of all ids, the same every time; and it takes from all of them, not from the lowest."""
    ids = [f"{i:016x}" for i in range(0, 2**64, 2**64 // 2000)]
    assert [times(id, 1.0) for id in ids[:5]] == [1] * 5
    assert [times(id, 2.0) for id in ids[:5]] == [2] * 5
    half = [times(id, 0.5) for id in ids]
    # Binomial: of 1000 in either half of the ids, 500 with a standard deviation of 16.
    assert abs(sum(half[:1000]) - 500) < 64
    assert abs(sum(half[1000:]) - 500) < 64
    assert {times(id, 1.5) for id in ids} == {1, 2}
    with pytest.raises(RecipeError, match="the weight of x is 0; give more than 0"):
        Source("x", weight=0)


def test_version_of_a_set_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its newest commit, or that of the revision asked for: what was tokenised of another one is made anew."""
    commits = {None: "aaa", "v1": "bbb"}
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda self, id, revision: SimpleNamespace(sha=commits[revision]))
    assert version(Source("some/set")) == "aaa"
    assert version(Source("some/set", revision="v1")) == "bbb"


def test_leaks_by_hand(tmp_path: Path) -> None:
    """Case, punctuation and white space do not hide an evaluation prompt; another word does."""
    path = tmp_path / "e.jsonl"
    path.write_bytes(lines([{"prompt": "What is 2 + 2?"}]))
    leaks = Leaks.of([Source(str(path))])
    for text, leaked in (("what is  2+2", True), ("What is 2 + 3?", False)):
        (row,) = rows_of(tmp_path, {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": text}]})
        assert leaks.has(row) == leaked


def rows_of(folder: Path, row: dict[str, object]) -> list[object]:
    path = folder / "one.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return [conversation for _, conversation in conversations([Source(str(path))], Refusals())]


def test_a_bad_row_says_what_is_wrong() -> None:
    from data.sources import Row

    with pytest.raises(BadRow, match="a key stands twice in an object: role"):
        parse(Row("x", '{"messages": [{"role": "user", "role": "user"}]}'))
