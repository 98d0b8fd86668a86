"""Loss masks of ten families of chat templates, worked by hand: what a server sends, and what the target then says.

In the expected texts, « and » enclose what is supervised; … stands for a beginning that is checked for being unsupervised only.
The templates are found in $PACESETTER_TEST_DATA/chat_templates, beside this repository by default.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from data.chat import Chat, Encoded, Message, Refused
from tests.conftest import ROOT, byte_tokenizer

TEMPLATES = Path(os.environ.get("PACESETTER_TEST_DATA", ROOT.parent / "shared" / "data")) / "chat_templates"
pytestmark = pytest.mark.skipif(not TEMPLATES.is_dir(), reason=f"no chat templates in {TEMPLATES}")

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "sum", "arguments": '{"a": 1}'}}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": PARAMETERS}}]


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, **more: Any) -> Message:
    return Message(role="assistant", content=text, **more)


SYSTEM = Message(role="system", content="be")
TOOL = Message(role="tool", content="2", tool_call_id="abcdefghi")
SINGLE = [user("hi"), assistant("yo")]
MULTI = [SYSTEM, user("a"), assistant("b"), user("c"), assistant("d")]
PLAIN_MULTI = MULTI[1:]
REASONED = [user("a"), assistant("b", reasoning_content="hm"), user("c"), assistant("d", reasoning_content="so")]
TOOL_USE = [user("1?"), assistant("", tool_calls=[CALL]), TOOL, assistant("two")]
REASONED_TOOL = [
    user("1?"),
    assistant("", tool_calls=[CALL], reasoning_content="hm"),
    TOOL,
    assistant("two", reasoning_content="so"),
]


class Family(NamedTuple):
    """file: the template's; special: its special tokens; bos, eos: of the tokenizer; ends: what ends an answer."""

    file: str
    special: list[str]
    ends: list[str]
    bos: str | None = None
    eos: str | None = None


QWEN = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
DEEPSEEK = [
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MISTRAL = [
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CALL_ID]", "[ARGS]", "[TOOL_CONTENT]"),
]
FAMILIES = {
    "qwen3": Family("Qwen-Qwen3-0.6B.jinja", QWEN, ["<|im_end|>"]),
    "qwq": Family("Qwen-QwQ-32B.jinja", QWEN, ["<|im_end|>"]),
    "llama3.2": Family("meta-llama-Llama-3.2-3B-Instruct.jinja", LLAMA, ["<|eot_id|>"], bos="<|begin_of_text|>"),
    "llama3.3": Family("meta-llama-Llama-3.3-70B-Instruct.jinja", LLAMA, ["<|eot_id|>"], bos="<|begin_of_text|>"),
    "gemma2": Family("google-gemma-2-2b-it.jinja", ["<bos>", "<start_of_turn>", "<end_of_turn>"], ["<end_of_turn>"], bos="<bos>"),
    "gpt-oss": Family(
        "openai-gpt-oss-120b.jinja",
        ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"],
        ["<|return|>", "<|call|>"],
    ),
    "deepseek3.1": Family("deepseek-ai-DeepSeek-V3.1.jinja", DEEPSEEK, ["<｜end▁of▁sentence｜>"], bos="<｜begin▁of▁sentence｜>"),
    "nemo": Family("mistralai-Mistral-Nemo-Instruct-2407.jinja", MISTRAL, ["</s>"], bos="<s>", eos="</s>"),
    "small3.2": Family("Mistral-Small-3.2-24B-Instruct-2506.jinja", MISTRAL, ["</s>"], bos="<s>", eos="</s>"),
    "phi3.5": Family(
        "microsoft-Phi-3.5-mini-instruct.jinja",
        ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"],
        ["<|end|>", "<|endoftext|>"],
        eos="<|endoftext|>",
    ),
}

IM, END = "<|im_start|>", "<|im_end|>"
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA_USER, LLAMA_ASSISTANT = HEADER.format("user"), HEADER.format("assistant")
LLAMA_HEAD = f"<|begin_of_text|>{HEADER.format('system')}Cutting Knowledge Date: December 2023\nToday Date: D\n\n"
B, E, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
DEEPSEEK_CALL = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>sum<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>' + E
DEEPSEEK_RESULT = "<｜tool▁output▁begin｜>2<｜tool▁output▁end｜>"
NEMO_TOOLS = (
    '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": {"type": "object", '
    '"properties": {"a": {"type": "number"}}, "required": ["a"]}}}][/AVAILABLE_TOOLS]'
)
QWEN_CALL = '<tool_call>\n{"name": "sum", "arguments": {"a": 1}}\n</tool_call>'
QWEN_RESULT = f"{IM}user\n<tool_response>\n2\n</tool_response>{END}\n"
GPT_USER, GPT_ASK = "<|start|>user<|message|>", "<|start|>assistant"

Case = tuple[str, dict[str, Any], list[Message], Any, list[str]]
NO_THINKING, THINKING, DATE = {"enable_thinking": False}, {"thinking": True}, {"date_string": "D"}
CASES: list[Case] = [
    # Qwen3, thinking: the template shows an answer's thoughts (or that it had none) until a later user's turn, then drops them.
    ("qwen3", {}, SINGLE, None, [f"{IM}user\nhi{END}\n{IM}assistant\n«<think>\n\n</think>\n\nyo{END}»"]),
    (
        *("qwen3", {}, REASONED, None),
        [
            f"{IM}user\na{END}\n{IM}assistant\n«<think>\nhm\n</think>\n\nb{END}»",
            f"{IM}user\na{END}\n{IM}assistant\nb{END}\n{IM}user\nc{END}\n{IM}assistant\n«<think>\nso\n</think>\n\nd{END}»",
        ],
    ),
    # Thoughts stay while a tool is asked: no user has spoken since.
    (
        *("qwen3", {}, REASONED_TOOL, TOOLS),
        [
            f"…{END}\n{IM}user\n1?{END}\n{IM}assistant\n«<think>\nhm\n</think>\n\n{QWEN_CALL}{END}»\n"
            f"{QWEN_RESULT}{IM}assistant\n«<think>\nso\n</think>\n\ntwo{END}»"
        ],
    ),
    # Qwen3 without thinking: the empty thoughts are the prompt's, not the target's; in history there are none.
    ("qwen3", NO_THINKING, SINGLE, None, [f"{IM}user\nhi{END}\n{IM}assistant\n<think>\n\n</think>\n\n«yo{END}»"]),
    (
        *("qwen3", NO_THINKING, MULTI, None),
        [
            f"{IM}system\nbe{END}\n{IM}user\na{END}\n{IM}assistant\n<think>\n\n</think>\n\n«b{END}»",
            f"{IM}system\nbe{END}\n{IM}user\na{END}\n{IM}assistant\nb{END}\n{IM}user\nc{END}\n{IM}assistant\n<think>\n\n</think>\n\n«d{END}»",
        ],
    ),
    (
        *("qwen3", NO_THINKING, TOOL_USE, TOOLS),
        [
            f"…{END}\n{IM}user\n1?{END}\n{IM}assistant\n<think>\n\n</think>\n\n«{QWEN_CALL}{END}»",
            f"…{END}\n{IM}user\n1?{END}\n{IM}assistant\n{QWEN_CALL}{END}\n{QWEN_RESULT}{IM}assistant\n<think>\n\n</think>\n\n«two{END}»",
        ],
    ),
    # QwQ: every prompt opens the thoughts; the template itself knows of none but those inside the content.
    (
        *("qwq", {}, [user("hi"), assistant("<think>\nhm\n</think>\n\nyo")], None),
        [f"{IM}user\nhi{END}\n{IM}assistant\n<think>\n«hm\n</think>\n\nyo{END}»"],
    ),
    (
        *("qwq", {}, REASONED, None),
        [
            f"{IM}user\na{END}\n{IM}assistant\n<think>\n«hm\n</think>\n\nb{END}»",
            f"{IM}user\na{END}\n{IM}assistant\nb{END}\n{IM}user\nc{END}\n{IM}assistant\n<think>\n«so\n</think>\n\nd{END}»",
        ],
    ),
    (
        *("qwq", {}, REASONED_TOOL, TOOLS),
        [
            f"…{END}\n{IM}user\n1?{END}\n{IM}assistant\n<think>\n«hm\n</think>\n\n\n{QWEN_CALL}{END}»",
            f"…{END}\n{IM}user\n1?{END}\n{IM}assistant\n{QWEN_CALL}{END}\n{QWEN_RESULT}"
            f"{IM}assistant\n<think>\n«so\n</think>\n\ntwo{END}»",
        ],
    ),
    *(
        (family, DATE, messages, tools, [expected])
        for family in ("llama3.2", "llama3.3")
        for messages, tools, expected in (
            (SINGLE, None, f"{LLAMA_HEAD}<|eot_id|>{LLAMA_USER}hi<|eot_id|>{LLAMA_ASSISTANT}«yo<|eot_id|>»"),
            (
                *(MULTI, None),
                f"{LLAMA_HEAD}be<|eot_id|>{LLAMA_USER}a<|eot_id|>{LLAMA_ASSISTANT}«b<|eot_id|>»"
                f"{LLAMA_USER}c<|eot_id|>{LLAMA_ASSISTANT}«d<|eot_id|>»",
            ),
            (
                *(TOOL_USE, TOOLS),
                f'…1?<|eot_id|>{LLAMA_ASSISTANT}«{{"name": "sum", "parameters": {{"a": 1}}}}<|eot_id|>»'
                f'{HEADER.format("ipython")}"2"<|eot_id|>{LLAMA_ASSISTANT}«two<|eot_id|>»',
            ),
        )
    ),
    ("gemma2", {}, SINGLE, None, ["<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n«yo<end_of_turn>»"]),
    (
        *("gemma2", {}, PLAIN_MULTI, None),
        [
            "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n«b<end_of_turn>»\n"
            "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n«d<end_of_turn>»"
        ],
    ),
    # What the target says before any user spoke is no answer to anything.
    (
        *("phi3.5", {}, [assistant("hello"), *SINGLE], None),
        ["<|assistant|>\nhello<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\n«yo<|end|>»"],
    ),
    # The template trims what is said.
    (
        *("gemma2", {}, [user(" hi "), assistant(" yo\n")], None),
        ["<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n«yo<end_of_turn>»"],
    ),
    # gpt-oss: the channel is the target's choice, so it is supervised; a last answer ends otherwise than an earlier one.
    ("gpt-oss", {}, SINGLE, None, [f"…{GPT_USER}hi<|end|>{GPT_ASK}«<|channel|>final<|message|>yo<|return|>»"]),
    (
        *("gpt-oss", {}, REASONED, None),
        [
            f"…{GPT_USER}a<|end|>{GPT_ASK}«<|channel|>analysis<|message|>hm<|end|>{GPT_ASK}<|channel|>final<|message|>b<|return|>»",
            f"…{GPT_USER}a<|end|>{GPT_ASK}<|channel|>final<|message|>b<|end|>{GPT_USER}c<|end|>"
            f"{GPT_ASK}«<|channel|>analysis<|message|>so<|end|>{GPT_ASK}<|channel|>final<|message|>d<|return|>»",
        ],
    ),
    (
        *("gpt-oss", {}, TOOL_USE, TOOLS),
        [
            f'…{GPT_USER}1?<|end|>{GPT_ASK}« to=functions.sum<|channel|>commentary json<|message|>{{"a": 1}}<|call|>»'
            f'<|start|>functions.sum to=assistant<|channel|>commentary<|message|>"2"<|end|>'
            f"{GPT_ASK}«<|channel|>final<|message|>two<|return|>»"
        ],
    ),
    ("deepseek3.1", {}, SINGLE, None, [f"{B}{U}hi{A}</think>«yo{E}»"]),
    ("deepseek3.1", {}, MULTI, None, [f"{B}be{U}a{A}</think>«b{E}»{U}c{A}</think>«d{E}»"]),
    ("deepseek3.1", {}, TOOL_USE, TOOLS, [f"{B}{U}1?{A}</think>«{DEEPSEEK_CALL}»{DEEPSEEK_RESULT}«two{E}»"]),
    (
        "deepseek3.1",
        THINKING,
        REASONED,
        None,
        [f"{B}{U}a{A}<think>«hm</think>b{E}»", f"{B}{U}a{A}</think>b{E}{U}c{A}<think>«so</think>d{E}»"],
    ),
    ("nemo", {}, SINGLE, None, ["<s>[INST]hi[/INST]«yo</s>»"]),
    # Nemo shows the system message in the last user's turn, wherever that is.
    ("nemo", {}, MULTI, None, ["<s>[INST]be\n\na[/INST]«b</s>»", "<s>[INST]a[/INST]b</s>[INST]be\n\nc[/INST]«d</s>»"]),
    (
        *("nemo", {}, TOOL_USE, TOOLS),
        [
            f'<s>{NEMO_TOOLS}[INST]1?[/INST]«[TOOL_CALLS][{{"name": "sum", "arguments": {{"a": 1}}, "id": "abcdefghi"}}]</s>»'
            '[TOOL_RESULTS]{"content": 2, "call_id": "abcdefghi"}[/TOOL_RESULTS]«two</s>»'
        ],
    ),
    ("small3.2", {}, SINGLE, None, ["…[/SYSTEM_PROMPT][INST]hi[/INST]«yo</s>»"]),
    ("small3.2", {}, MULTI, None, ["<s>[SYSTEM_PROMPT]be[/SYSTEM_PROMPT][INST]a[/INST]«b</s>»[INST]c[/INST]«d</s>»"]),
    (
        *("small3.2", {}, [SYSTEM, *TOOL_USE], TOOLS),
        [
            '…[/AVAILABLE_TOOLS][INST]1?[/INST]«[TOOL_CALLS]sum[CALL_ID]abcdefghi[ARGS]{"a": 1}</s>»'
            "[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]2[/TOOL_RESULTS]«two</s>»"
        ],
    ),
    # The tools stand before the last user's turn, so a second question moves them.
    (
        *("small3.2", {}, [SYSTEM, *PLAIN_MULTI], TOOLS),
        [
            "…[/AVAILABLE_TOOLS][INST]a[/INST]«b</s>»",
            "<s>[SYSTEM_PROMPT]be[/SYSTEM_PROMPT][INST]a[/INST]b</s>…[/AVAILABLE_TOOLS][INST]c[/INST]«d</s>»",
        ],
    ),
    # Phi ends a text that asks for no answer with another token; the answers end before it.
    ("phi3.5", {}, SINGLE, None, ["<|user|>\nhi<|end|>\n<|assistant|>\n«yo<|end|>»"]),
    (
        *("phi3.5", {}, MULTI, None),
        ["<|system|>\nbe<|end|>\n<|user|>\na<|end|>\n<|assistant|>\n«b<|end|>»\n<|user|>\nc<|end|>\n<|assistant|>\n«d<|end|>»"],
    ),
    ("phi3.5", {}, [SYSTEM, *SINGLE], None, ["<|system|>\nbe<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\n«yo<|end|>»"]),
]


def chat_of(name: str, kwargs: dict[str, Any]) -> Chat:
    family = FAMILIES[name]
    tokenizer = byte_tokenizer(family.special)
    tokenizer.chat_template = (TEMPLATES / family.file).read_text(encoding="utf-8")
    tokenizer.bos_token, tokenizer.eos_token = family.bos, family.eos
    return Chat(tokenizer, set(tokenizer.convert_tokens_to_ids(family.ends)), kwargs)


def marked(chat: Chat, encoded: Encoded) -> str:
    """The text of the tokens, what is supervised between « and »."""
    text, done = "", 0
    for start, end in encoded.spans:
        text += f"{chat.tokenizer.decode(encoded.tokens[done:start])}«{chat.tokenizer.decode(encoded.tokens[start:end])}»"
        done = end
    return text + chat.tokenizer.decode(encoded.tokens[done:])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{'-'.join(case[1])}-{len(case[2])}")
def test_masks_by_hand(case: Case) -> None:
    name, kwargs, messages, tools, expected = case
    chat = chat_of(name, kwargs)
    documents = chat.encode(messages, tools)
    assert len(documents) == len(expected)
    for encoded, text in zip(documents, expected, strict=True):
        found = marked(chat, encoded)
        if "…" not in text:
            assert found == text
            continue
        begin, end = text.split("…")
        assert found.startswith(begin)
        assert found.endswith(end)
        assert "«" not in found[len(begin) : len(found) - len(end)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{'-'.join(case[1])}-{len(case[2])}")
def test_what_is_read_is_what_a_server_sends(case: Case) -> None:
    """Up to each answer, a document is the prompt of that turn, token by token; and it holds one BOS at most."""
    name, kwargs, messages, tools, _ = case
    chat = chat_of(name, kwargs)
    turns = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    starts = [(tokens, start) for tokens, spans in chat.encode(messages, tools) for start, _ in spans]
    assert len(starts) == len(turns)
    for (tokens, start), turn in zip(starts, turns, strict=True):
        assert tokens[:start] == chat.prompt(messages[:turn], tools)
        assert tokens.count(chat.tokenizer.bos_token_id) == (1 if FAMILIES[name].bos else 0)


REFUSALS: list[tuple[str, dict[str, Any], list[Message], Any, str]] = [
    ("gemma2", {}, MULTI, None, "the chat template refuses it: System role not supported"),
    ("gemma2", {}, [user("a"), user("b"), assistant("c")], None, "the chat template refuses it: Conversation roles must alternate"),
    ("gemma2", {}, TOOL_USE, TOOLS, "the chat template leaves out a tool's part: turn 1"),
    ("nemo", {}, [user("a"), user("b"), assistant("c")], None, "conversation roles must alternate"),
    ("phi3.5", {}, TOOL_USE, TOOLS, "the chat template leaves out a tool's part: turn 1"),
    ("qwq", {}, SINGLE, None, "the target is asked with .*<think>.*is its reasoning missing"),
    ("qwen3", NO_THINKING, REASONED, None, "the target is asked with .*</think>.* the answer stands behind"),
    ("deepseek3.1", THINKING, SINGLE, None, "the target is asked with .*<think>.*is its reasoning missing"),
    ("llama3.2", DATE, [user("1?"), assistant("", tool_calls=[CALL, CALL])], TOOLS, "only supports single tool-calls at once"),
]


@pytest.mark.parametrize(("name", "kwargs", "messages", "tools", "reason"), REFUSALS)
def test_what_cannot_be_shown_as_served_is_refused(
    name: str, kwargs: dict[str, Any], messages: list[Message], tools: Any, reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        chat_of(name, kwargs).encode(messages, tools)
