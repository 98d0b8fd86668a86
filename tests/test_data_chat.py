"""Tokens and answers of conversations on a byte-level tokenizer; the families of real templates are in test_data_templates.py."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.chat import Chat, Encoded, Layout, Message, Refused, eos_ids, load_tokenizer, split_reasoning
from recipes.load import RecipeError
from tests.conftest import byte_tokenizer


def say(*turns: str) -> list[Message]:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [Message(role=roles[turn[0]], content=turn[2:]) for turn in turns]


def make_chat(template: str | None = None) -> Chat:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return Chat(tokenizer, {2})


def show(messages: list[Message], chat: Chat | None = None) -> list[str]:
    """The documents, with a dot for every token that is only read."""
    chat = chat or make_chat()
    found = []
    for tokens, spans in chat.encode(messages):
        on = {i for start, end in spans for i in range(start, end)}
        found.append("".join(chat.tokenizer.decode([token]) if i in on else "." for i, token in enumerate(tokens)))
    return found


def test_single_turn_by_hand() -> None:
    """Every byte and every special token is one token; the answer and its end are supervised, the newline behind is not there."""
    head = 1 + len("user\nhi") + 1 + 1 + 1 + len("assistant\n")
    assert show(say("u hi", "a yo")) == ["." * head + "yo<|im_end|>"]


def test_multi_turn_by_hand() -> None:
    first = 1 + len("system\nbe") + 2 + 1 + len("user\na") + 2 + 1 + len("assistant\n")
    between = 1 + 1 + len("user\nbb") + 2 + 1 + len("assistant\n")
    assert show(say("s be", "u a", "a b", "u bb", "a cc")) == ["." * first + "b<|im_end|>" + "." * between + "cc<|im_end|>"]


def test_no_answer_no_document() -> None:
    """What is said before any user's turn answers nothing; what a user says last is of no use."""
    assert make_chat().encode(say("u hi")) == []
    assert make_chat().encode(say("a hello", "u hi")) == []
    assert show(say("u hi", "a yo", "u more")) == show(say("u hi", "a yo"))


def test_prompt_and_answer_join_to_the_whole() -> None:
    """What is read for an answer, plus the answer, is what encode() makes of the answered conversation."""
    messages, chat = say("u what?", "a that"), make_chat()
    (document,) = chat.encode(messages)
    assert document.tokens[: document.spans[0][0]] == chat.prompt(messages[:1])


def test_a_template_that_rewrites_history_gets_a_document_per_turn() -> None:
    """A template that shows only the last answer: each answer stands behind what its own turn was asked with."""
    chat = make_chat(
        "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}|{% endif %}{% endfor %}"
    )
    assert show(say("u a", "a bb", "u c", "a dd"), chat) == ["..bb|", "....dd|"]


MARKED = (
    "{{% for m in messages %}}{{% if m['role'] != 'assistant' %}}U:{{{{ m['content'] }}}};{{% elif {answers} %}}"
    "A:{{% generation %}}{{{{ m['content'] }}}}<|im_end|>{{% endgeneration %}}{{% endif %}}{{% endfor %}}"
)


def test_a_template_that_marks_its_answers() -> None:
    """{% generation %}: what it encloses, and the end of sequence that follows at once."""
    chat = make_chat(MARKED.format(answers="true") + "{% if add_generation_prompt %}A:{% endif %}")
    expected = ["." * 6 + "bb<|im_end|>" + "." * 6 + "dd<|im_end|>"]
    assert show(say("u a", "a bb", "u c", "a dd"), chat) == expected
    # Where <|im_end|> ends nothing, what is marked is supervised all the same, and not a token more.
    chat.end = re.compile(r"(?!)")
    assert show(say("u a", "a bb", "u c", "a dd"), chat) == expected
    # Behind the mark, the end counts, too.
    chat = make_chat(MARKED.format(answers="true").replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"))
    assert show(say("u a", "a bb"), chat) == ["." * 4 + "A:bb<|im_end|>"], "no generation prompt: the answer begins with A:"


def test_marks_do_not_hide_what_a_server_reads() -> None:
    """A greeting before the first question answers nothing; a template that rewrites gets a document per turn, marked or not."""
    chat = make_chat(MARKED.format(answers="true") + "{% if add_generation_prompt %}A:{% endif %}")
    assert show(say("a yo", "u a", "a bb"), chat) == ["." * len("A:yo_U:a;A:") + "bb<|im_end|>"]
    chat = make_chat(MARKED.format(answers="loop.last") + "{% if add_generation_prompt %}A:{% endif %}")
    assert show(say("u a", "a bb", "u c", "a dd"), chat) == ["." * 6 + "bb<|im_end|>", "." * 10 + "dd<|im_end|>"]


def test_an_answer_ends_at_its_first_end() -> None:
    """Whatever the template writes behind it, and whatever text pretends to be a token."""
    assert show(say("u a", "a b<|im_end|>c"))[0].endswith(".b<|im_end|>")


def test_a_template_that_hides_an_answer_is_refused() -> None:
    with pytest.raises(Refused, match="the chat template shows nothing of an answer: turn 1"):
        make_chat("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}").encode(say("u a", "a b"))


def test_a_token_across_the_border_is_refused() -> None:
    """Characters 0-2 are one token of the tokenizer here; an answer cannot begin at the second."""
    chat = make_chat()
    (good, bad) = chat.tokenize([Layout("<|im_end|>x", [(10, 11)]), Layout("<|im_end|>x", [(4, 11)])])
    assert good == Encoded(good.tokens, [(1, 2)])  # type: ignore[union-attr]
    assert isinstance(bad, Refused)


def test_characters_of_several_tokens() -> None:
    """An emoji is four bytes, four tokens here: all are the answer's."""
    chat = make_chat()
    ((tokens, spans),) = chat.encode(say("u é", "a 🙂"))
    ((start, end),) = spans
    assert chat.tokenizer.decode(tokens[start:end]) == "🙂<|im_end|>"
    assert end - start == 5


def test_cut_by_hand() -> None:
    """At the end of an answer where one fits whole, else in the middle of the first; never anything supervised behind the cut."""
    document = Encoded(list(range(10)), [(2, 4), (6, 9)])
    assert document.cut(10) == document
    assert document.cut(9) == Encoded(list(range(9)), [(2, 4), (6, 9)])
    assert document.cut(8) == Encoded([0, 1, 2, 3], [(2, 4)])
    assert document.cut(3) == Encoded([0, 1, 2], [(2, 3)])
    assert document.cut(2) == Encoded([0, 1], [])
    assert [document.cut(n).num_supervised for n in (10, 8, 3, 2)] == [5, 2, 1, 0]


STRIPPED = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_reasoning_is_never_dropped_without_a_word() -> None:
    """A template that knows nothing of it gets it in the content, where the target would have written it; one that takes it out
    even there has the row refused."""
    messages = [*say("u hi"), Message(role="assistant", content="yo", reasoning_content="because")]
    assert show(messages)[0].lstrip(".") == "<think>\nbecause\n</think>\n\nyo<|im_end|>"
    assert show(say("u hi", "a yo"), make_chat(STRIPPED))[0].lstrip(".") == "yo<|im_end|>"
    with pytest.raises(Refused, match=r"leaves out an answer's reasoning: take it off, or have the template think"):
        make_chat(STRIPPED).encode(messages)


def test_reasoning_stands_in_either_place() -> None:
    assert split_reasoning(Message(role="assistant", content="c", reasoning_content="r")) == ("r", "c")
    assert split_reasoning(Message(role="assistant", content="<think>\nr\n</think>\n\nc")) == ("r", "c")
    assert split_reasoning(Message(role="assistant", content="c")) == ("", "c")


TURN = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(TURN, TURN), min_size=1, max_size=4), st.integers(2, 120))
def test_supervised_is_what_assistants_said(turns: list[tuple[str, str]], max_length: int) -> None:
    """Of any texts: the supervised tokens are the answers', each to its end, and nothing else; cut or not, ranges lie inside."""
    chat = make_chat()
    messages = [m for asked, said in turns for m in (Message(role="user", content=asked), Message(role="assistant", content=said))]
    (document,) = chat.encode(messages)
    said = [chat.tokenizer.decode(document.tokens[start:end]) for start, end in document.spans]
    assert said == [text.partition("<|im_end|>")[0] + "<|im_end|>" for _, text in turns]
    cut = document.cut(max_length)
    assert len(cut.tokens) <= max_length
    assert all(0 <= start < end <= len(cut.tokens) for start, end in cut.spans)
    assert cut.tokens == document.tokens[: len(cut.tokens)]


def test_eos_ids_are_all_collected(tmp_path: Path) -> None:
    """The tokenizer's id and those of generation_config.json; Llama-3 has three."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert eos_ids(byte_tokenizer(), tmp_path) == {2, 5, 7}


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="has no chat template; use an instruction-tuned model"):
        load_tokenizer(tmp_path)


def test_render_shows_what_a_server_reads() -> None:
    assert make_chat().render(say("u hi"), None, prompt=True) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_kwargs_reach_the_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ date_string }}" + tokenizer.chat_template
    chat = Chat(tokenizer, {2}, {"date_string": "today "})
    assert chat.render(say("u hi"), None, prompt=False).startswith("today <|im_start|>")
