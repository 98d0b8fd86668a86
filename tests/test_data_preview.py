"""What a person sees of the data, and evaluation sets made into prompts."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

import data.preview
import data.prompts
from data.batch import Document
from data.chat import Chat
from data.preview import CONTEXT, CUT, OFF, SPECIAL, SUPERVISED, coloured, histogram
from tests.conftest import byte_tokenizer, call_script, write_jsonl


def test_colours_by_hand() -> None:
    chat = Chat(byte_tokenizer(), {2})
    (tokens, spans), *_ = chat.encode([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}])
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    mask[spans[0][0] : spans[0][1]] = True
    document = Document("x", torch.tensor(tokens), mask)
    plain = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yo<|im_end|>»"
    assert coloured(chat, document, cut=False, colour=False) == plain
    assert coloured(chat, document, cut=True, colour=False) == f"{plain}[what follows is behind data.max_length]"
    shown = coloured(chat, document, cut=True, colour=True)
    assert shown.startswith(f"{SPECIAL}{CONTEXT}<|im_start|>{OFF}{CONTEXT}user\nhi{OFF}")
    assert f"{SUPERVISED}yo{OFF}{SPECIAL}{SUPERVISED}<|im_end|>{OFF}{CUT}[what follows" in shown


def test_histogram_by_hand() -> None:
    lines = histogram(torch.tensor([4, 5, 7, 9, 40]), width=6)
    assert [line.split() for line in lines] == [
        ["4", "..", "7", "######", "3"],
        ["8", "..", "15", "##", "1"],
        ["16", "..", "31", "0"],
        ["32", "..", "63", "##", "1"],
    ]


def test_preview_of_a_recipe(tmp_path: Path, tiny_target: Path) -> None:
    rows = [{"prompt": f"q{i}", "response": "yes"} for i in range(30)] + [{"prompt": "q"}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "r.yaml").write_text(
        f"name: r\ntarget: {{model: {tiny_target}}}\n"
        "data: {answered: rows.jsonl, max_bad_share: 0.1, test_share: 0, validation_share: 0}\n"
    )
    shown = call_script(data.preview.main, "r.yaml", "--row", "3", cwd=tmp_path).stdout
    assert "«yes<|im_end|>»" in shown
    assert "31 rows, 30 documents: 30 train, 0 validation, 0 test; for training:" in shown
    assert "training document 3 of 30, in no file's order: rows.jsonl, line " in shown
    assert "0 answers without an end" in shown
    assert "30 documents, 30 answers" in shown
    assert "a draft vocabulary would hold, by size: 2048: 100.00%" in shown
    assert "left out: 1 x no answer; the first: rows.jsonl, line 31" in shown
    refused = call_script(data.preview.main, "r.yaml", "--row", "30", cwd=tmp_path, expect=2).stderr
    assert "--row is 30, but there are 30 training documents" in refused


def test_evaluation_sets_become_prompts(tmp_path: Path) -> None:
    """Turns of a user, questions with answers, categories of their own or the folder's; one prompt counts once."""
    write_jsonl(tmp_path / "bench" / "question.jsonl", [{"turns": ["a", "b"], "category": "writing"}, {"turns": ["c"]}])
    write_jsonl(tmp_path / "gsm" / "test.jsonl", [{"question": "c", "answer": "x"}, {"question": "d", "answer": "y"}, {"x": 1}])
    words = ("out.jsonl", "bench/question.jsonl", "gsm/test.jsonl")
    too_many = call_script(data.prompts.main, *words, cwd=tmp_path, expect=2).stderr
    assert "1 of 5 rows cannot be used, more than --max-bad-share 0.01 (all in out.jsonl.refused)" in too_many
    assert not (tmp_path / "out.jsonl").exists()
    shown = call_script(data.prompts.main, *words, "--max-bad-share", "0.2", cwd=tmp_path).stdout
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["category"], [m["content"] for m in row["messages"]]) for row in rows] == [
        ("writing", ["a", "b"]),
        ("bench", ["c"]),
        ("gsm", ["d"]),
    ]
    assert "left out: 1 x unknown shape; the first: gsm/test.jsonl, line 3" in shown
    assert "left out: 1 x asked before, word for word; the first: gsm/test.jsonl, line 1" in shown
    assert "out.jsonl: 3 prompts" in shown
    refused = call_script(data.prompts.main, "out.jsonl", "gsm/test.jsonl", cwd=tmp_path, expect=2).stderr
    assert "out.jsonl is there already" in refused


SHARED = Path(os.environ.get("PACESETTER_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no evaluation sets in {SHARED}")
def test_the_evaluation_sets_of_the_field(tmp_path: Path) -> None:
    """Numbers of prompts as their authors give them: MT-bench 80, GSM8K 1319, HumanEval 164, MATH-500 500, Spec-Bench 480 less the
    80 of MT-bench and the 80 of GSM8K's test."""
    files = ("mt_bench/question.jsonl", "gsm8k/test.jsonl", "humaneval/HumanEval.jsonl", "math500/math500.jsonl")
    words = ("out.jsonl", *(str(SHARED / file) for file in (*files, "spec_bench/question.jsonl")))
    shown = call_script(data.prompts.main, *words, cwd=tmp_path).stdout
    assert re.findall("left out: (.*?);", shown) == ["160 x asked before, word for word"]
    categories = [json.loads(line)["category"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert categories.count("gsm8k") == 1319
    assert categories.count("humaneval") == 164
    assert categories.count("math500") == 500
    assert len(categories) == 80 + 1319 + 164 + 500 + 320
