"""What is asked of the target, prompt by prompt, whoever asks: the offline engine in this process, or running servers."""

import hashlib
from collections.abc import Generator
from typing import Any, NamedTuple

from data.chat import Refused
from data.conversations import SamplingConfig


class Generated(NamedTuple):
    """What the target wrote after a prompt; finish_reason: "stop" where it came to an end, "length" where that was cut off; another
    one, such as "abort", is no answer."""

    tokens: list[int]
    text: str
    finish_reason: str


Dialogue = Generator[list[int], Generated, dict[str, Any]]
"""Yields prompts, token ids, is sent what the target wrote after each, and returns the row to keep."""


class Ended(NamedTuple):
    """A dialogue's end: its row, or why it has none; and how many tokens the target wrote in it."""

    key: str
    row: dict[str, Any] | None
    problem: str | None
    num_tokens: int


class Asking:
    """A dialogue under way: the prompt that waits for the target, or how it ended."""

    def __init__(self, key: str, dialogue: Dialogue) -> None:
        self.key, self.dialogue, self.turn, self.num_tokens = key, dialogue, 0, 0
        self.prompt: list[int] = []
        self.ended: Ended | None = None
        self._go_on(None)

    def answered(self, output: Generated) -> None:
        """Goes on with what the target wrote."""
        self.turn += 1
        self.num_tokens += len(output.tokens)
        if output.finish_reason in ("stop", "length"):
            self._go_on(output)
        else:
            self.failed(f"an answer ended with {output.finish_reason}")

    def failed(self, problem: str) -> None:
        """Ends without a row."""
        self.ended = Ended(self.key, None, problem, self.num_tokens)

    def _go_on(self, output: Generated | None) -> None:
        try:
            self.prompt = next(self.dialogue) if output is None else self.dialogue.send(output)
        except StopIteration as end:
            self.ended = Ended(self.key, end.value, None, self.num_tokens)
        except Refused as error:
            self.failed(str(error))


def room(asking: Asking, sampling: SamplingConfig, max_length: int) -> int:
    """Tokens that an answer may have: the document it ends has to fit max_length."""
    return min(sampling.max_tokens, max_length - len(asking.prompt))


def request_seed(seed: int, asking: Asking) -> int:
    """The seed of a request: of a dialogue's turn, whichever process asks."""
    return int.from_bytes(hashlib.sha256(f"{seed}-{asking.key}-{asking.turn}".encode()).digest()[:4], "big")
