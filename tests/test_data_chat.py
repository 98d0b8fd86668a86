"""Tokens and loss masks of conversations, worked by hand on a byte-level tokenizer."""

from pathlib import Path

import pytest

from data.chat import Message, encode, eos_ids, load_tokenizer, prompt_tokens, render
from recipes.load import RecipeError
from tests.conftest import byte_tokenizer

EOS = {2}


def say(*turns: str) -> list[Message]:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [Message(role=roles[turn[0]], content=turn[2:]) for turn in turns]


def supervised(text_by_token: list[str], mask: list[bool]) -> str:
    return "".join(token if on else "." for token, on in zip(text_by_token, mask, strict=True))


def show(messages: list[Message]) -> str:
    """The rendered conversation with everything unsupervised as a dot per token."""
    tokenizer = byte_tokenizer()
    tokens, mask = encode(tokenizer, messages, eos=EOS)
    return supervised([tokenizer.decode([token]) for token in tokens], mask)


def test_single_turn_by_hand() -> None:
    """Every byte and every special token is one token; the answer and its end are supervised, the newline behind is not."""
    head = 1 + len("user\nhi") + 1 + 1 + 1 + len("assistant\n")
    assert show(say("u hi", "a yo")) == "." * head + "yo<|im_end|>" + "."


def test_multi_turn_by_hand() -> None:
    first = 1 + len("system\nbe") + 2 + 1 + len("user\na") + 2 + 1 + len("assistant\n")
    between = 1 + 1 + len("user\nbb") + 2 + 1 + len("assistant\n")
    assert show(say("s be", "u a", "a b", "u bb", "a cc")) == "." * first + "b<|im_end|>" + "." * between + "cc<|im_end|>" + "."


def test_no_assistant_turn_supervises_nothing() -> None:
    assert not any(encode(byte_tokenizer(), say("u hi"), eos=EOS).loss_mask)


def test_prompt_and_answer_join_to_the_whole() -> None:
    """What is read for an answer, plus the answer, is what encode() makes of the answered conversation."""
    tokenizer = byte_tokenizer()
    messages = say("u what?", "a that")
    tokens, mask = encode(tokenizer, messages, eos=EOS)
    start = mask.index(True)
    assert tokens[:start] == prompt_tokens(tokenizer, messages[:1])


def test_a_template_that_rewrites_history_is_refused() -> None:
    """A template that shows only the last answer has no stable prefix: supervising it would teach text that is never served."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}|{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="changes the text before turn 1"):
        encode(tokenizer, say("u a", "a b", "u c", "a d"), eos=EOS)


def test_eos_ids_are_all_collected(tmp_path: Path) -> None:
    """The tokenizer's id and those of generation_config.json; Llama-3 has three."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert eos_ids(byte_tokenizer(), tmp_path) == {2, 5, 7}


def test_no_chat_template(tiny_target: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="has no chat template; use an instruction-tuned model"):
        load_tokenizer(tmp_path)


def test_render_shows_what_a_server_reads() -> None:
    text = render(byte_tokenizer(), say("u hi"), add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
