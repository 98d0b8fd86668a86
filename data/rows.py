"""Rows of data sets, whatever their shape, as conversations."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from data.chat import Message, Refused, Tools

SHAPES = (
    '"messages" (role, content; tools, tool_calls, reasoning_content), "conversations" (from, value), "turns" (the user\'s), '
    '"prompt" ("response"), "instruction" ("input", "output"), "question" ("answer"), or "text"'
)
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
ANSWERS = {"prompt": ("response", "completion", "chosen"), "question": ("answer", "response", "solution")}


class BadRow(Refused):
    """A row that is no conversation."""


class Conversation(NamedTuple):
    """messages: in order. tools: what the target may call, in OpenAI's shape. text: a row that is no conversation but plain text,
    messages then empty."""

    messages: list[Message]
    tools: Tools | None = None
    text: str | None = None

    def asked(self) -> "Conversation":
        """The same without the answers at its end."""
        last = max((i for i, message in enumerate(self.messages) if message["role"] != "assistant"), default=-1)
        return self._replace(messages=self.messages[: last + 1])

    @property
    def id(self) -> str:
        """Hash of what is said, blind to differences in white space."""
        return content_id(self.messages, self.tools, self.text)


def content_id(messages: Sequence[Message], tools: Tools | None = None, text: str | None = None) -> str:
    """16 hexadecimal digits of what is said, blind to differences in white space."""
    said: list[Any] = [(m["role"], " ".join(m["content"].split())) for m in messages]
    more = [{k: v for k, v in m.items() if k in ("reasoning_content", "tool_calls")} for m in messages]
    if any(more) or tools or text:
        said = [said, more, tools, " ".join(text.split()) if text else None]
    return hashlib.sha256(json.dumps(said, ensure_ascii=False, sort_keys=True).encode()).hexdigest()[:16]


def to_conversation(row: Mapping[str, Any]) -> Conversation:
    """The conversation in a row; BadRow where there is none."""
    tools = _tools(row.get("tools"))
    if isinstance(turns := row.get("messages"), Sequence) and not isinstance(turns, str):
        return Conversation(_messages(turns, "role", "content"), tools)
    if isinstance(turns := row.get("conversations", row.get("conversation")), Sequence) and not isinstance(turns, str):
        keys = ("from", "value") if any(isinstance(turn, Mapping) and "from" in turn for turn in turns) else ("role", "content")
        system = row.get("system")
        first = [Message(role="system", content=system)] if isinstance(system, str) and system else []
        return Conversation([*first, *_messages(turns, *keys)], tools)
    if isinstance(turns := row.get("turns"), Sequence) and not isinstance(turns, str):
        return Conversation(_messages([{"role": "user", "content": turn} for turn in turns], "role", "content"), tools)
    for key, answers in ANSWERS.items():
        if isinstance(row.get(key), str):
            return Conversation(_pair(row[key], next((row[name] for name in answers if row.get(name)), None)), tools)
    if isinstance(instruction := row.get("instruction"), str):
        instances = row.get("instances")
        given = instances[0] if isinstance(instances, Sequence) and instances and isinstance(instances[0], Mapping) else row
        asked = "\n\n".join(part for part in (instruction, given.get("input")) if isinstance(part, str) and part)
        return Conversation(_pair(asked, given.get("output")), tools)
    if isinstance(row.get("text"), str):
        if not row["text"].strip():
            raise BadRow("empty text")
        return Conversation([], None, row["text"])
    raise BadRow("unknown shape", f"has {_short(sorted(map(str, row)))}; a row needs {SHAPES}")


def _pair(asked: str, answer: Any) -> list[Message]:
    turns = [{"role": "user", "content": asked}]
    if isinstance(answer, str):
        turns.append({"role": "assistant", "content": answer})
    return _messages(turns, "role", "content")


def _messages(turns: Sequence[Any], role_key: str, content_key: str) -> list[Message]:
    messages = [_message(turn, role_key, content_key) for turn in turns]
    if not any(message["role"] == "user" for message in messages):
        raise BadRow("no user's turn", _short(turns))
    return messages


def _message(turn: Any, role_key: str, content_key: str) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRow("a message is not an object", _short(turn))
    role = turn.get(role_key)
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow("unknown role", f"{_short(role)}; known are {', '.join(ROLES)}")
    message = Message(role=ROLES[role], content=_content(turn.get(content_key)))
    reasoning = turn.get("reasoning_content") or turn.get("reasoning") or turn.get("thinking")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    if calls := turn.get("tool_calls"):
        message["tool_calls"] = _tool_calls(calls)
    if isinstance(turn.get("tool_call_id"), str):
        message["tool_call_id"] = turn["tool_call_id"]
    if isinstance(turn.get("name"), str):
        message["name"] = turn["name"]
    if not message["content"].strip() and not message.get("tool_calls") and message["role"] in ("user", "assistant"):
        raise BadRow(f"an empty {message['role']}'s turn")
    return message


def _content(content: Any) -> str:
    """Text, or the text of its parts, joined by line breaks, as vLLM joins them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRow("content is no text", _short(content))
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise BadRow("content has a part that is no text", _short(part))
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadRow("tool_calls is no list", _short(calls))
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRow("a tool call has no function with a name", _short(call))
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                json.loads(arguments)
            except ValueError:
                raise BadRow("the arguments of a tool call are not valid JSON", _short(arguments)) from None
        found.append({**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return found


def _tools(tools: Any) -> Tools | None:
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError:
            raise BadRow("tools is not valid JSON", _short(tools)) from None
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRow("tools is no list of objects", _short(tools))
    # Some sets list the bare functions.
    return [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 120 else text[:117] + "..."
