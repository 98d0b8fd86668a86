"""Conversations through the target's own chat template: what it reads, and which of those tokens it wrote itself.

What a drafter trains on is what a server would have read and the target would have said, turn by turn:

    rendered for turn t, as a server does        <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n
    the answer, up to its end-of-sequence token                                                        yo<|im_end|>

Where the prompt and answer of every turn are the beginning of the next turn's prompt, one document holds them all. A template that
rewrites what came before, as reasoning models' do with earlier thoughts, gets one document per turn.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

from jinja2 import TemplateError
from tokenizers import Encoding
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from recipes.load import RecipeError

THINK, END_THINK = "<think>", "</think>"


class Message(TypedDict, total=False):
    """One turn, in OpenAI's shape: role (system, developer, user, assistant, tool), text, and what else a template may read."""

    role: str
    content: str
    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str


Tools = list[dict[str, Any]]


class Refused(ValueError):
    """A row that cannot be used. reason: few words, the same for all rows of its kind; the text says more."""

    def __init__(self, reason: str, more: str = "") -> None:
        super().__init__(f"{reason}: {more}" if more else reason)
        self.reason = reason


class Encoded(NamedTuple):
    """Token ids of a document, and the ranges (first, behind the last) that the target produced, ascending."""

    tokens: list[int]
    spans: list[tuple[int, int]]

    def cut(self, max_length: int) -> "Encoded":
        """At most max_length tokens of it: up to the end of an answer, if one fits whole, else up to the middle of the first."""
        if len(self.tokens) <= max_length:
            return self
        whole = [span for span in self.spans if span[1] <= max_length]
        if whole:
            return Encoded(self.tokens[: whole[-1][1]], whole)
        return Encoded(self.tokens[:max_length], [(first, max_length) for first, _ in self.spans[:1] if first < max_length])

    @property
    def num_supervised(self) -> int:
        return sum(end - start for start, end in self.spans)


class Layout(NamedTuple):
    """A document before it is tokenised: its text, and the ranges of characters that the target produced, ascending."""

    text: str
    answers: list[tuple[int, int]]


def load_tokenizer(target: Path) -> PreTrainedTokenizerFast:
    """The target's tokenizer; RecipeError when it has no chat template, or cannot say where in a text its tokens stand."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise RecipeError(f"target {target} has a slow tokenizer ({type(tokenizer).__name__}); add its tokenizer.json there")
    if not tokenizer.chat_template:
        raise RecipeError(
            f"target {target} has no chat template; use an instruction-tuned model, or add its chat_template.jinja to that folder"
        )
    return tokenizer


def eos_ids(tokenizer: PreTrainedTokenizerFast, target: Path) -> set[int]:
    """Every token id that ends an answer: the tokenizer's, and those of generation_config.json."""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    if (target / "generation_config.json").is_file():
        more = GenerationConfig.from_pretrained(target).eos_token_id
        ids |= set(more if isinstance(more, list) else [more])
    return {token for token in ids if token is not None}


class Chat:
    """A target's chat template. kwargs: what the recipe passes on to it (enable_thinking, date_string)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, eos: set[int], kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer, self.eos = tokenizer, eos
        self.kwargs = {**tokenizer.special_tokens_map, **(kwargs or {})}
        template = tokenizer.chat_template
        self.template: str = template["default"] if isinstance(template, dict) else template
        self.marks_answers = re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None
        self.hidden = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        ends = [re.escape(str(tokenizer.convert_ids_to_tokens(token))) for token in sorted(eos)]
        self.end = re.compile("|".join(ends) or r"(?!)")

    @classmethod
    def load(cls, target: Path, kwargs: dict[str, Any] | None = None) -> "Chat":
        """The chat template in a target's folder."""
        tokenizer = load_tokenizer(target)
        return cls(tokenizer, eos_ids(tokenizer, target), kwargs)

    def render(self, messages: Sequence[Message], tools: Tools | None, *, prompt: bool) -> str:
        """The conversation as the template writes it, special tokens and all. prompt: with what makes the target answer."""
        return self._render(messages, tools, prompt=prompt)[0]

    def _render(self, messages: Sequence[Message], tools: Tools | None, *, prompt: bool, marks: bool = False) -> tuple[str, Any]:
        """The text, and the ranges the template itself marks as the target's."""

        def render(plain: list[dict[str, Any]]) -> tuple[str, Any]:
            conversations, callables = [plain], cast("list[Any] | None", tools)
            (text,), ranges = render_jinja_template(  # type: ignore[str-unpack]
                conversations,
                callables,
                None,
                self.template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self.kwargs,
            )
            return text, ranges[0] if marks else None

        try:
            try:
                return render([_plain(message, _as_object) for message in messages])
            except TypeError:  # this template wants the arguments of a tool call as text
                return render([_plain(message, _as_text) for message in messages])
        except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise Refused("the chat template refuses it", str(error)) from None

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """What the target reads before it answers ``messages``, as a server sends it."""
        return list(self.tokenizer(self.render(messages, tools, prompt=True), add_special_tokens=False)["input_ids"])

    def encode(self, messages: Sequence[Message], tools: Tools | None = None) -> list[Encoded]:
        """The documents of a conversation; none if it has no assistant's turn. Refused where the template cannot show it."""
        found = self.tokenize(self.lay_out(messages, tools))
        for document in found:
            if isinstance(document, Refused):
                raise document
        return [document for document in found if isinstance(document, Encoded)]

    def lay_out(self, messages: Sequence[Message], tools: Tools | None = None) -> list[Layout]:
        """The documents of a conversation as text; each ends with its last answer. What is said before the first user's turn
        answers nothing and is read only."""
        asked = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > asked]
        if not turns:
            return []
        self._all_shown(messages[: turns[-1] + 1], tools)
        if self.marks_answers and (marked := self._marked(messages[: turns[-1] + 1], turns, tools)):
            return [marked]
        found = [self._turn(messages, turn, tools) for turn in turns]
        prompt, answer = found[-1]
        last = prompt + answer
        if all(last.startswith(prompt + answer) for prompt, answer in found):
            return [Layout(last, [(len(prompt), len(prompt) + len(answer)) for prompt, answer in found])]
        return [Layout(prompt + answer, [(len(prompt), len(prompt) + len(answer))]) for prompt, answer in found]

    def _marked(self, messages: Sequence[Message], turns: list[int], tools: Tools | None) -> Layout | None:
        """All answers as the template itself marks them, each with the end-of-sequence token that follows; None where what stands
        before one of them is not what a server reads there."""
        text, ranges = self._render(messages, tools, prompt=False, marks=True)
        spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(ranges) != len(spoken):
            return None
        answers = []
        for turn, (start, end) in zip(spoken, ranges, strict=True):
            if turn not in turns:
                continue
            if text[:start] != self.render(messages[:turn], tools, prompt=True):
                return None
            inside = self.end.search(text, start, end)
            behind = self.end.match(text, end)
            answers.append((start, inside.end() if inside else behind.end() if behind else end))
        return Layout(text[: answers[-1][1]], answers)

    def tokenize(self, layouts: list[Layout]) -> list[Encoded | Refused]:
        """The documents' tokens. One with a token across the beginning of an answer is refused: it is never served like that."""
        if not layouts:
            return []
        texts = [layout.text for layout in layouts]
        # Its own tokenizer, without transformers' lists of every token's place and mask: a third of the time.
        encodings = self.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        found: list[Encoded | Refused] = []
        for layout, encoding in zip(layouts, encodings, strict=True):
            spans = [(_first_token(encoding, layout, start), _first_token(encoding, layout, end)) for start, end in layout.answers]
            borders = zip(spans, layout.answers, strict=True)
            if any(first and _place(encoding, first - 1)[1] > start for (first, _), (start, _) in borders):
                found.append(Refused("one token lies across the beginning of an answer", "take white space off its head"))
            else:
                found.append(Encoded(encoding.ids, spans))
        return found

    def _turn(self, messages: Sequence[Message], turn: int, tools: Tools | None) -> tuple[str, str]:
        """What a server reads before the assistant's turn, and what the target then says, to its end."""
        before = messages[:turn]
        prompt = self.render(before, tools, prompt=True)
        answer = self._answer(prompt, before, messages[turn], tools)
        if not answer:
            raise Refused("the chat template shows nothing of an answer", f"turn {turn}")
        return prompt, self._to_end(answer)

    def _answer(self, prompt: str, before: Sequence[Message], message: Message, tools: Tools | None) -> str:
        """What stands behind the prompt once the message is there, as the template shows the last message.

        Four ways, for templates differ in what they show of an answer: as it is; with the reasoning inside the content, for one
        that ignores reasoning_content; with the reasoning put back where the template left none, though its prompt opens it;
        behind another prompt, for one that moves the system message or the tools with the last user's turn.
        """
        through = self.render([*before, message], tools, prompt=False)
        reasoning, content = split_reasoning(message)
        if through.startswith(prompt) and reasoning.strip() in through[len(prompt) :]:
            return through[len(prompt) :]
        if reasoning:
            inside = Message(**{**message, "content": f"{THINK}\n{reasoning}\n{END_THINK}\n\n{content}"})
            inside.pop("reasoning_content", None)
            text = self.render([*before, inside], tools, prompt=False)
            if text.startswith(prompt) and reasoning.strip() in text[len(prompt) :]:
                return text[len(prompt) :]
            stem = prompt.removesuffix(THINK)
            if stem != prompt and through.startswith(stem + END_THINK):
                return reasoning + through[len(stem) :]
            if through.startswith(prompt):
                raise Refused(
                    "the chat template leaves out an answer's reasoning",
                    "take it off, or have the template think: data.chat_template_kwargs",
                )
        # What the template writes before any answer here: all that this one has in common with quite another.
        other = self.render([*before, Message(role="assistant", content="\ue000")], tools, prompt=False)
        opening = _common(through, other)
        asked = self.render(before, tools, prompt=False)
        generation_prompt = prompt[len(asked) :] if prompt.startswith(asked) else prompt
        if len(_common(opening[::-1], prompt[::-1])) > len(generation_prompt):
            return through[len(opening) :]
        hint = "" if reasoning else "; is its reasoning missing?"
        raise Refused(
            "the chat template shows an answer behind another prompt than a server's",
            f"the target is asked with {prompt[-30:]!r}, the answer stands behind {opening[-30:]!r}{hint}",
        )

    def _all_shown(self, messages: Sequence[Message], tools: Tools | None) -> None:
        """Refused where the template leaves out a tool's call or reply without a word, as templates that know of none do."""
        for i, message in enumerate(messages):
            if message["role"] == "tool" or "tool_calls" in message:
                bare = Message(role=message["role"], content=message["content"]) if "tool_calls" in message else None
                without = [*messages[:i], *([bare] if bare else [])]
                if self.render([*messages[:i], message], tools, prompt=False) == self.render(without, tools, prompt=False):
                    raise Refused("the chat template leaves out a tool's part", f"turn {i}")

    def _to_end(self, answer: str) -> str:
        """An answer up to its first end-of-sequence token."""
        end = self.end.search(answer)
        return answer[: end.end()] if end else answer


def _first_token(encoding: Encoding, layout: Layout, char: int) -> int:
    """Index of the first token that begins at a character of the text, or behind it."""
    if char == len(layout.text):
        return len(encoding)
    token = encoding.char_to_token(char)
    if token is not None and _place(encoding, token)[0] == char:
        return token
    return bisect_left([start for start, _ in encoding.offsets], char)


def _place(encoding: Encoding, token: int) -> tuple[int, int]:
    """The range of characters that a token stands for; of a special token in no text, none."""
    return encoding.token_to_chars(token) or (0, 0)


def split_reasoning(message: Message) -> tuple[str, str]:
    """(reasoning, the rest of the content) of an answer, its reasoning in a field of its own or at the head of its content."""
    content = message["content"]
    if reasoning := message.get("reasoning_content"):
        return reasoning, content
    head, end, rest = content.partition(END_THINK)
    return (head.removeprefix(THINK).strip("\n"), rest.lstrip("\n")) if end else ("", content)


def _common(one: str, other: str) -> str:
    """What both begin with."""
    return one[: next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))]


def _plain(message: Message, arguments: Callable[[Any], Any]) -> dict[str, Any]:
    """A message as templates read it. arguments: how those of its tool calls are written."""
    plain: dict[str, Any] = dict(message)
    if "reasoning_content" in plain:
        plain["thinking"] = plain["reasoning_content"]  # gpt-oss's name for it
    if "tool_calls" in plain:
        functions = [(call, call["function"]) for call in plain["tool_calls"]]
        plain["tool_calls"] = [
            {**call, "function": {**function, "arguments": arguments(function["arguments"])}} for call, function in functions
        ]
    return plain


def _as_object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
