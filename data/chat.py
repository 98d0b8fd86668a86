"""Conversations through the target's own chat template: what it reads, and which of those tokens it wrote itself."""

from pathlib import Path
from typing import NamedTuple, TypedDict

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recipes.load import RecipeError


class Message(TypedDict):
    """One turn: role (system, user, assistant) and text."""

    role: str
    content: str


class Encoded(NamedTuple):
    """Token ids of a conversation, and, per token, whether the target produced it."""

    tokens: list[int]
    loss_mask: list[bool]


def load_tokenizer(target: Path) -> PreTrainedTokenizerBase:
    """The target's tokenizer; RecipeError when it has no chat template."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(target)
    if not tokenizer.chat_template:
        raise RecipeError(
            f"target {target} has no chat template; use an instruction-tuned model, or add its chat_template.jinja to that folder"
        )
    return tokenizer


def eos_ids(tokenizer: PreTrainedTokenizerBase, target: Path) -> set[int]:
    """Every token id that ends an answer: the tokenizer's, and those of generation_config.json."""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    if (target / "generation_config.json").is_file():
        more = GenerationConfig.from_pretrained(target).eos_token_id
        ids |= set(more if isinstance(more, list) else [more])
    return {token for token in ids if token is not None}


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """What the target reads before it answers ``messages``: the template with its generation prompt, as a server sends it."""
    text = render(tokenizer, messages, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, eos: set[int]) -> Encoded:
    """Tokens and loss mask of a whole conversation. An answer's span runs from behind its generation prompt to its first
    end-of-sequence token.

    Found by rendering the prefix before and with each assistant turn, on character offsets of one tokenisation. Raises
    ValueError with the reason when the template rewrites what came before, so that no such prefix exists, or when a token
    lies across the border.
    """
    text = render(tokenizer, messages, add_generation_prompt=False)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens: list[int] = list(encoding["input_ids"])
    mask = [False] * len(tokens)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:turn], add_generation_prompt=True)
        through = render(tokenizer, messages[: turn + 1], add_generation_prompt=False)
        if not (text.startswith(through) and through.startswith(before)):
            raise ValueError(f"the chat template changes the text before turn {turn} once later turns follow")
        for i, (start, end) in enumerate(encoding["offset_mapping"]):
            if end <= len(before) or start >= len(through):
                continue
            if start < len(before):
                raise ValueError(f"one token lies across the start of turn {turn}")
            mask[i] = True
            if tokens[i] in eos:
                break
    return Encoded(tokens, mask)


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, add_generation_prompt: bool) -> str:
    """The conversation as the target's chat template writes it, special tokens and all."""
    plain: list[dict[str, str]] = [{"role": m["role"], "content": m["content"]} for m in messages]
    text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert isinstance(text, str)
    return text
