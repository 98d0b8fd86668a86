"""Reading prompts and answers, and the split: errors name file and line, sides never share an opening."""

from collections import Counter
from pathlib import Path

import pytest

from data.chat import Message
from data.conversations import (
    DataConfig,
    documents,
    messages_id,
    read_answers,
    read_prompts,
    repeated_share,
    split_of,
)
from recipes.load import RecipeError
from tests.conftest import byte_tokenizer, write_jsonl


def user(text: str) -> Message:
    return Message(role="user", content=text)


def test_prompts_of_both_shapes_and_duplicates(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "hi"}, {"messages": [user(" hi ")]}, {"messages": [user("yo")]}])
    assert [m[-1]["content"] for m in read_prompts(path).values()] == [" hi ", "yo"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "p.jsonl, line 2: not valid JSON"),
        ('{"prompt": "a"}\n\n[1]\n', "p.jsonl, line 3: expected an object, got list"),
        ('{"text": "a"}\n', 'p.jsonl, line 1: needs "messages" (a list) or "prompt" (a string), has [\'text\']'),
        ('{"messages": [{"role": "user"}]}\n', 'p.jsonl, line 1: every message needs a "role" and a "content" string'),
        ('{"messages": [{"role": "assistant", "content": "x"}]}\n', "p.jsonl, line 1: the last message must be the user's"),
        ('{"messages": []}\n', 'p.jsonl, line 1: needs "messages" (a list) or "prompt" (a string)'),
        ("\n", "p.jsonl has no prompts"),
    ],
)
def test_bad_prompts(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        read_prompts(path)
    assert message in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no\.jsonl does not exist"):
        read_prompts(tmp_path / "no.jsonl")


def test_split_keeps_continuations_together_and_shares_roughly() -> None:
    """All continuations of one opening fall on one side; sides get about the shares asked for."""
    data = DataConfig(test_share=0.2, validation_share=0.1)
    sides = Counter()
    for i in range(2000):
        opening = [user(f"question {i}")]
        longer = [*opening, Message(role="assistant", content="a"), user("and then?")]
        assert split_of(opening, data) == split_of(longer, data)
        sides[split_of(opening, data)] += 1
    # Binomial with n = 2000: three standard deviations are 54 and 40.
    assert abs(sides["test"] - 400) < 54
    assert abs(sides["validation"] - 200) < 40


def test_sides_by_hand() -> None:
    """The first 16 hex digits of sha256 of '[["user", "q 5"]]' stand at 0.249 of their range, of q 9 at 0.343, q 0 at 0.643."""
    data = DataConfig(test_share=0.3, validation_share=0.1)
    assert [split_of([user(f"q {i}")], data) for i in (5, 9, 0)] == ["test", "validation", "train"]
    assert messages_id([user("a  b")]) == messages_id([user("a b")]) != messages_id([user("ab")])


def answer_rows(count: int) -> list[dict[str, object]]:
    return [
        {
            "messages": [user(f"q{i}"), Message(role="assistant", content="yes")],
            "tokens": [5, 6, 7, 8 + i, 9],
            "answer_start": 2,
            "finish_reason": "stop" if i % 2 else "length",
        }
        for i in range(count)
    ]


def test_answers_become_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded ids are used as they are; truncated answers only when asked for; order by content, not by file."""
    monkeypatch.chdir(tmp_path)
    rows = answer_rows(40)
    write_jsonl(tmp_path / "runs" / "x-data" / "answers.jsonl", rows)
    data = DataConfig(test_share=0.0, validation_share=0.0)
    kept = read_answers(data, "x", target="t")
    assert len(kept) == 20
    write_jsonl(tmp_path / "runs" / "x-data" / "answers.jsonl", rows[::-1])
    assert read_answers(data, "x", target="t") == kept
    assert len(read_answers(DataConfig(keep_truncated=True), "x", target="t")) == 40
    (first, *_) = documents(kept, data, "train", tokenizer=byte_tokenizer(), eos={2})
    assert first.tokens_T.tolist()[:3] == [5, 6, 7]
    assert first.loss_mask_T.tolist() == [False, False, True, True, True]
    (cut, *_) = documents(
        kept, DataConfig(test_share=0.0, validation_share=0.0, max_length=4), "train", tokenizer=byte_tokenizer(), eos={2}
    )
    assert len(cut.tokens_T) == len(cut.loss_mask_T) == 4


def test_rows_made_elsewhere_go_through_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    messages = [user("hi"), Message(role="assistant", content="yo")]
    write_jsonl(tmp_path / "runs" / "x-data" / "answers.jsonl", [{"messages": messages}])
    data = DataConfig(test_share=0.0, validation_share=0.0)
    (document,) = documents(read_answers(data, "x", target="t"), data, "train", tokenizer=byte_tokenizer(), eos={2})
    said = document.tokens_T[document.loss_mask_T].tolist()
    assert byte_tokenizer().decode(said) == "yo<|im_end|>"


def test_answers_of_another_target_or_to_other_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that another target answered is refused; one whose prompt the recipe has no more is left out; bad rows are named."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "x-data" / "answers.jsonl"
    rows = [{**row, "target": "t", "key": messages_id([user(f"q{i}")])} for i, row in enumerate(answer_rows(6))]
    write_jsonl(path, rows)
    data = DataConfig(prompts=write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"q{i}"} for i in range(4)]), keep_truncated=True)
    assert sorted(row.messages[0]["content"] for row in read_answers(data, "x", target="t")) == ["q0", "q1", "q2", "q3"]
    with pytest.raises(RecipeError, match=r"line 1: answered by another target \(fingerprint t, this recipe's is u\)"):
        read_answers(data, "x", target="u")
    for row, message in (
        ({"messages": [{"role": "user", "content": None}]}, "line 1: every message needs"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 1: a conversation needs a user's turn"),
    ):
        write_jsonl(path, [row])
        with pytest.raises(RecipeError, match=message):
            read_answers(data, "x", target="t")


def test_conversations_the_template_refuses_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason, and without stopping the others."""
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    # Shows a conversation's length first, so that every prefix differs from the whole.
    tokenizer.chat_template = "{% if messages|length > 2 %}{{ messages|length }}{% endif %}" + tokenizer.chat_template
    answer = Message(role="assistant", content="yo")
    rows = [{"messages": [user("hi"), answer]}, {"messages": [user("a"), answer, user("b"), answer]}]
    write_jsonl(tmp_path / "runs" / "x-data" / "answers.jsonl", rows)
    data = DataConfig(test_share=0.0, validation_share=0.0)
    assert len(documents(read_answers(data, "x", target="t"), data, "train", tokenizer=tokenizer, eos={2})) == 1
    assert "train: 1 of 2 conversations left out; the first: the chat template changes the text" in capsys.readouterr().err


def test_empty_and_lopsided_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"answers.jsonl does not exist; make it with: python data/regenerate.py"):
        read_answers(DataConfig(), "x", target="t")
    write_jsonl(tmp_path / "runs" / "x-data" / "answers.jsonl", [])
    with pytest.raises(RecipeError, match=r"answers.jsonl has no usable answers"):
        read_answers(DataConfig(), "x", target="t")
    write_jsonl(tmp_path / "runs" / "x-data" / "answers.jsonl", answer_rows(1))
    with pytest.raises(RecipeError, match=r"all 1 were cut by data\.answers\.max_tokens"):
        read_answers(DataConfig(), "x", target="t")
    write_jsonl(tmp_path / "runs" / "x-data" / "answers.jsonl", answer_rows(2))
    data = DataConfig(test_share=0.0)
    with pytest.raises(RecipeError, match=r"none of 1 conversations is in the test split .* raise data\.test_share"):
        documents(read_answers(data, "x", target="t"), data, "test", tokenizer=byte_tokenizer(), eos={2})


def test_repeated_share_by_hand() -> None:
    """a b a b a b has 2-grams ab ba ab ba ab: 3 of 5 occurred before; the second answer's one 2-gram did not."""
    assert repeated_share([[1, 2, 1, 2, 1, 2], [1, 2]], n=2) == 3 / 6
    assert repeated_share([[1]]) == 0.0
