"""Rows of every accepted shape, and what is wrong with others."""

from typing import Any

import pytest

from data.rows import BadRow, Conversation, content_id, to_conversation

HI, YO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, YO]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, YO], "id": 3},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        {"conversations": [HI, YO]},
        {"prompt": "hi", "response": "yo"},
        {"prompt": "hi", "completion": "yo"},
        {"question": "hi", "answer": "yo"},
        {"instruction": "hi", "input": "", "output": "yo"},
        {"instruction": "hi", "instances": [{"input": "", "output": "yo"}]},
    ],
)
def test_shapes_of_an_answered_conversation(row: dict[str, Any]) -> None:
    assert to_conversation(row) == Conversation([HI, YO])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "row", [{"prompt": "hi"}, {"turns": ["hi"]}, {"question": "hi"}, {"instruction": "hi"}, {"messages": [HI]}]
)
def test_shapes_of_a_prompt(row: dict[str, Any]) -> None:
    assert to_conversation(row) == Conversation([HI])  # type: ignore[list-item]


def test_what_else_a_row_may_hold() -> None:
    """A system message of its own, several turns, an input, plain text, reasoning, tools with and without their envelope."""
    assert to_conversation({"system": "be", "conversations": [HI, YO]}).messages[0] == {"role": "system", "content": "be"}
    assert [m["content"] for m in to_conversation({"turns": ["a", "b"]}).messages] == ["a", "b"]
    assert to_conversation({"instruction": "add", "input": "1 2", "output": "3"}).messages[0]["content"] == "add\n\n1 2"
    assert to_conversation({"text": "once"}) == Conversation([], None, "once")
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert to_conversation({"messages": [HI, {**YO, name: "hm"}]}).messages[1]["reasoning_content"] == "hm"
    asked = to_conversation(
        {"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": '[{"name": "f"}]'}
    )
    assert asked.tools == [{"type": "function", "function": {"name": "f"}}]
    assert asked.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert to_conversation({"messages": [{"role": "user", "content": parts}]}).messages[0]["content"] == "a\nb"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, 'unknown shape: has \\[\\]; a row needs "messages"'),
        ({"messages": []}, "no user's turn"),
        ({"messages": [YO]}, "no user's turn"),
        ({"messages": [None]}, "a message is not an object: null"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, 'unknown role: "narrator"; known are system, developer, user'),
        ({"messages": [{"content": "x"}]}, "unknown role: null"),
        ({"messages": [{"role": "user", "content": None}]}, "an empty user's turn"),
        ({"messages": [HI, {"role": "assistant", "content": " "}]}, "an empty assistant's turn"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is no text: 5"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content has a part that is no text"),
        ({"messages": [HI, {**YO, "tool_calls": [{"name": "f"}]}]}, "a tool call has no function with a name"),
        (
            {"messages": [HI, {**YO, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "the arguments of a tool call are not valid JSON",
        ),
        ({"messages": [HI, YO], "tools": "{"}, "tools is not valid JSON"),
        ({"text": " "}, "empty text"),
    ],
)
def test_bad_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow, match=message):
        to_conversation(row)


def test_ids_by_hand() -> None:
    """The first 16 hexadecimal digits of sha256 of '[["user", "q 5"]]', whatever its white space; other fields count, too."""
    assert content_id([{"role": "user", "content": "q  5"}]) == "3fcd9915ccf0fa3b"
    plain = to_conversation({"messages": [HI, YO]})
    assert plain.id == to_conversation({"prompt": " hi ", "response": "yo\n"}).id
    others = [
        to_conversation({"messages": [HI, {**YO, "reasoning_content": "r"}]}),
        to_conversation({"messages": [HI, {**YO, "tool_calls": [CALL]}]}),
        to_conversation({"messages": [HI, YO], "tools": [{"name": "f"}]}),
        to_conversation({"messages": [HI, {**YO, "content": "no"}]}),
    ]
    assert len({plain.id, *(other.id for other in others)}) == 5
