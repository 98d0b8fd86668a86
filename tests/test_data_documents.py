"""From rows to documents on disk: what is kept, what is left out and why, and in which order."""

import datetime
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data.chat import Chat, Message
from data.conversations import DataConfig, read_prompts, repeated_share, split_of
from data.documents import Documents, open_documents, prepared_tokens
from data.rows import Conversation, content_id
from data.sources import Leaks, Source
from recipes.load import RecipeError
from tests.conftest import byte_tokenizer, write_jsonl

ALL = {"test_share": 0.0, "validation_share": 0.0}


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def own_rows(count: int) -> list[dict[str, Any]]:
    """Rows as data/regenerate.py writes them: every other one was cut short."""
    return [
        {
            "key": content_id([user(f"q{i}")]),
            "messages": [user(f"q{i}"), assistant("yes")],
            "documents": [{"tokens": [5, 6, 7, 8 + i, 9], "spans": [[2, 5]]}],
            "finish_reason": "stop" if i % 2 else "length",
            "target": "t",
        }
        for i in range(count)
    ]


def write_own(rows: list[dict[str, Any]]) -> Path:
    return write_jsonl(Path("runs") / "x-data" / "answers.jsonl", rows)


def make(split: str = "train", template: str | None = None, target: str = "t", **data: Any) -> Documents:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    config = DataConfig(**{**ALL, **data})  # type: ignore[arg-type]
    chat = Chat(tokenizer, {2}, config.chat_template_kwargs)
    return open_documents(config, "x", chat=chat, target=target).split(split)  # type: ignore[arg-type]


def test_the_targets_own_tokens_are_used_as_they_are() -> None:
    """Truncated answers only when asked for; the order is that of the content, not of the file."""
    rows = own_rows(40)
    write_own(rows)
    kept = make()
    assert len(kept) == 20
    assert kept.lengths == [5] * 20
    first = kept[0]
    assert first.tokens_T.tolist()[:3] == [5, 6, 7]
    assert first.loss_mask_T.tolist() == [False, False, True, True, True]
    before = [(d.id, d.tokens_T.tolist()) for d in kept]
    assert [id for id, _ in before] == sorted(id for id, _ in before)
    write_own(rows[::-1])
    assert [(d.id, d.tokens_T.tolist()) for d in make()] == before
    assert len(make(keep_truncated=True)) == 40
    assert [len(d.tokens_T) for d in make(max_length=4)] == [4] * 20


def test_only_what_the_target_answered_greedily_is_said_to_be() -> None:
    """By the sampling that its rows have on record; not rows without one, nor text that was tokenised here."""
    rows = own_rows(6)
    for row, temperature in zip(rows, (0, 0.0, 0.7, 1, None, 0), strict=True):
        row |= {"finish_reason": "stop"} | ({} if temperature is None else {"sampling": {"temperature": temperature, "top_p": 1.0}})
    del rows[5]["documents"]
    write_own(rows)
    write_jsonl(Path("more.jsonl"), [{"messages": [user("a"), assistant("bcd")], "sampling": {"temperature": 0}}])
    found = {int(d.tokens_T[3]) - 8 if len(d.tokens_T) == 5 else "text": d.greedy for d in make(answered=(Source("more.jsonl"),))}
    assert found == {0: True, 1: True, 2: False, 3: False, 4: False, "text": False}


def test_what_plans_know_of_the_data() -> None:
    """Of 20 documents of 5 tokens, three of each are the target's; a split of two is no training data. Before that, nothing."""
    assert prepared_tokens("x") is None
    write_own(own_rows(40))
    train = make(validation_share=0.2)
    tokens, share = prepared_tokens("x") or (0, 0.0)
    assert 0 < tokens == 5 * len(train) < 100
    assert share == 3 / 5


def test_rows_made_elsewhere_go_through_the_template() -> None:
    """An answered source beside the target's own answers, each of its rows as often as it weighs; plain text as it stands."""
    write_jsonl(Path("more.jsonl"), [{"messages": [user("hi"), assistant("yo")]}, {"text": "once upon"}])
    found = make(answered=(Source("more.jsonl", weight=2.0),))
    tokenizer = byte_tokenizer()
    said = sorted(tokenizer.decode(d.tokens_T[d.loss_mask_T].tolist()) for d in found)
    assert said == ["once upon", "once upon", "yo<|im_end|>", "yo<|im_end|>"]
    assert len({d.id for d in found}) == 4
    write_own(own_rows(2))
    assert len(make(answered=(Source("more.jsonl"),))) == 3


def test_a_document_per_turn_where_the_template_rewrites() -> None:
    write_jsonl(Path("more.jsonl"), [{"messages": [user("a"), assistant("bb"), user("c"), assistant("dd")]}])
    template = "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}|{% endif %}{% endfor %}"
    found = make(template=template, answered=(Source("more.jsonl"),))
    assert [byte_tokenizer().decode(d.tokens_T.tolist()) for d in found] == ["a|bb|", "a|c|dd|"]
    assert found[1].id == found[0].id + "-1"


def test_what_is_left_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """With place and reason, in refused.jsonl and on the terminal; too many stop the run, but not those that are nobody's fault."""
    good = [{"messages": [user(f"q{i}"), assistant("no")]} for i in range(8)]
    bad = [{"messages": [user("hi")]}, {"messages": [user("what is 2+2?"), assistant("four")]}]
    write_jsonl(Path("more.jsonl"), [*good, *bad])
    write_jsonl(Path("eval.jsonl"), [{"prompt": "What is 2 + 2"}])
    write_own(own_rows(4))
    settings: dict[str, Any] = {"answered": (Source("more.jsonl"),), "evaluation": (Source("eval.jsonl"),)}
    with pytest.raises(
        RecipeError, match=r"1 of 14 rows cannot be used, more than data\.max_bad_share = 0\.01 \(all in runs/x-data"
    ):
        make(**settings)
    assert len(make(**settings, max_bad_share=0.1)) == 10
    shown = capsys.readouterr().err
    assert "left out: 1 x no answer; the first: more.jsonl, line 9: no answer" in shown
    assert "left out: 1 x an evaluation prompt; the first: more.jsonl, line 10" in shown
    assert "left out: 2 x cut by data.answers.max_tokens" in shown
    assert "word for word" not in shown
    rows = [json.loads(line) for line in (Path("runs") / "x-data" / "refused.jsonl").read_text().splitlines()]
    assert Counter(row["reason"] for row in rows) == {
        "no answer": 1,
        "an evaluation prompt": 1,
        "cut by data.answers.max_tokens": 2,
    }


def test_answers_of_another_target_or_to_other_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    """A row that another target answered stops the run; one whose prompt the recipe has no more is left out."""
    write_own(own_rows(6))
    prompts = (Source(str(write_jsonl(Path("p.jsonl"), [{"prompt": f"q{i}"} for i in range(4)]))),)
    assert len(make(prompts=prompts, keep_truncated=True)) == 4
    write_jsonl(Path("e.jsonl"), [{"prompt": "Q1!"}])
    assert len(make(prompts=prompts, keep_truncated=True, evaluation=(Source("e.jsonl"),))) == 3
    shown = capsys.readouterr().err
    assert "an evaluation prompt; the first: runs/x-data/answers.jsonl, line 2" in shown
    assert "prompts have no answer yet" not in shown, "the one that is kept out is not asked"
    with pytest.raises(
        RecipeError, match=r"answered by another target; the first: .*line 1: .* its fingerprint is t, this recipe's u"
    ):
        make(target="u", keep_truncated=True)


def test_only_our_own_rows_are_read_as_such() -> None:
    """Another recipe's answers, as any other conversations: their keys, targets and tokens mean nothing here."""
    write_own(own_rows(6))
    write_jsonl(Path("other.jsonl"), [{**row, "target": "u", "documents": 3, "key": [1]} for row in own_rows(9)[6:]])
    prompts = (Source(str(write_jsonl(Path("p.jsonl"), [{"prompt": f"q{i}"} for i in range(6)]))),)
    found = make(prompts=prompts, keep_truncated=True, answered=(Source("other.jsonl"),))
    assert len(found) == 9
    assert sorted(found.lengths)[:6] == [5] * 6
    assert min(sorted(found.lengths)[6:]) > 20, "the template's"


def test_answers_asked_for_otherwise() -> None:
    write_own([{**row, "chat_template_kwargs": {"thinking": True}} for row in own_rows(4)])
    assert len(make(chat_template_kwargs={"thinking": True}, keep_truncated=True)) == 4
    with pytest.raises(RecipeError, match=r"asked with other data\.chat_template_kwargs"):
        make(keep_truncated=True)


def test_a_cached_set_is_checked_again(capsys: pytest.CaptureFixture[str]) -> None:
    """What one run may leave out, another may not; unanswered prompts are said."""
    write_own([*own_rows(4), {"key": content_id([user("q9")]), "messages": 3}])
    prompts = (Source(str(write_jsonl(Path("p.jsonl"), [{"prompt": f"q{i}"} for i in range(10)]))),)
    assert len(make(prompts=prompts, keep_truncated=True, max_bad_share=0.5)) == 4
    assert "5 of 10 prompts have no answer yet; python data/regenerate.py <recipe> goes on" in capsys.readouterr().err
    with pytest.raises(RecipeError, match=r"1 of 5 rows cannot be used, more than data\.max_bad_share = 0\.01"):
        make(prompts=prompts, keep_truncated=True)
    (Path("runs") / "x-data" / "answers.jsonl").unlink()
    with pytest.raises(RecipeError, match=r"answers.jsonl does not exist"):
        make(prompts=prompts, answered=prompts)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(RecipeError, match=r"data\.chat_template_kwargs: .*date.*; write it in quotes"):
        DataConfig(chat_template_kwargs={"date_string": datetime.date(2024, 7, 26)})
    with pytest.raises(RecipeError, match=r"the weight of p is 2\.0, but a prompt is answered once; give 1 or less"):
        DataConfig(prompts=(Source("p", weight=2.0),))


def test_documents_are_made_once() -> None:
    """The second time they are only mapped; another setting, another template or another row makes them anew."""
    write_own(own_rows(4))
    make()
    folders = Path("runs") / "x-data" / "documents"
    (first,) = folders.iterdir()
    stamp = first.stat().st_mtime_ns
    make()
    assert first.stat().st_mtime_ns == stamp
    make(max_length=4)
    make(template="{{ messages }}")
    write_own(own_rows(6))
    make()
    assert len(list(folders.iterdir())) == 4


def test_several_processes_give_the_same() -> None:
    """Of rows with tokens, and of such that go through the template."""
    write_own(own_rows(600))
    write_jsonl(Path("more.jsonl"), [{"messages": [user(f"hi {i}"), assistant("yo " * (i % 7 + 1))]} for i in range(300)])
    more = (Source("more.jsonl"),)
    one = [(d.id, d.tokens_T.tolist()) for d in make(num_proc=1, answered=more)]
    assert len(one) == 600
    for path in (Path("runs") / "x-data" / "documents").iterdir():
        path.rename(path.with_name("gone"))
    assert [(d.id, d.tokens_T.tolist()) for d in make(num_proc=2, answered=more)] == one


def test_empty_and_lopsided_data() -> None:
    with pytest.raises(
        RecipeError,
        match=r"answers.jsonl does not exist; make it with: python data/synthesize.py <recipe>, then python data/regenerate.py",
    ):
        make()
    write_own(own_rows(1))
    with pytest.raises(RecipeError, match=r"no row of x can be trained on: 1 x cut by data\.answers\.max_tokens"):
        make()
    write_own(own_rows(2))
    with pytest.raises(RecipeError, match=r"none of 1 documents is in the test split; add prompts, or raise data\.test_share"):
        make("test")
    write_own([])
    with pytest.raises(RecipeError, match=r"there is no row in runs/x-data/answers\.jsonl"):
        make()


def prompts(*leaks: str, **data: Any) -> list[str]:
    return [conversation.messages[-1]["content"] for _, conversation in read_prompts(DataConfig(**data), "x", Leaks(leaks))]


def test_prompts() -> None:
    """Of all shapes; one given twice counts once; a last answer is taken off; plain text asks nothing."""
    rows = [{"prompt": "hi"}, {"messages": [user(" hi ")]}, {"messages": [user("yo"), assistant("what")]}, {"text": "x"}]
    path = write_jsonl(Path("p.jsonl"), rows)
    with pytest.raises(RecipeError, match=r"1 of 4 rows cannot be used.*plain text asks nothing"):
        prompts(prompts=(Source(str(path)),))
    assert prompts(prompts=(Source(str(path)),), max_bad_share=0.3) == ["hi", "yo"]
    assert prompts("YO!", prompts=(Source(str(path)),), max_bad_share=0.3) == ["hi"]
    listed = [json.loads(line) for line in (Path("runs") / "x-data" / "refused-prompts.jsonl").read_text().splitlines()]
    assert [(row["where"], row["reason"]) for row in listed] == [
        ("p.jsonl, line 3", "an evaluation prompt"),
        ("p.jsonl, line 4", "plain text asks nothing"),
    ]
    write_jsonl(Path("none.jsonl"), [])
    with pytest.raises(RecipeError, match=r"none\.jsonl: no prompts"):
        prompts(prompts=(Source("none.jsonl"),))


def test_split_keeps_continuations_together_and_shares_roughly() -> None:
    """All continuations of one opening fall on one side; sides get about the shares asked for."""
    data = DataConfig(test_share=0.2, validation_share=0.1)
    sides: Counter[str] = Counter()
    for i in range(2000):
        opening = [user(f"question {i}")]
        longer = [*opening, assistant("a"), user("and then?")]
        assert split_of(Conversation(opening), data) == split_of(Conversation(longer), data)
        sides[split_of(Conversation(opening), data)] += 1
    # Binomial with n = 2000: three standard deviations are 54 and 40.
    assert abs(sides["test"] - 400) < 54
    assert abs(sides["validation"] - 200) < 40


def test_sides_by_hand() -> None:
    """The first 16 hex digits of sha256 of '[["user", "q 5"]]' stand at 0.249 of their range, of q 9 at 0.343, q 0 at 0.643."""
    data = DataConfig(test_share=0.3, validation_share=0.1)
    assert [split_of(Conversation([user(f"q {i}")]), data) for i in (5, 9, 0)] == ["test", "validation", "train"]


def test_repeated_share_by_hand() -> None:
    """a b a b a b has 2-grams ab ba ab ba ab: 3 of 5 occurred before; the second answer's one 2-gram did not."""
    assert repeated_share([[1, 2, 1, 2, 1, 2], [1, 2]], n=2) == 3 / 6
    assert repeated_share([[1]]) == 0.0
