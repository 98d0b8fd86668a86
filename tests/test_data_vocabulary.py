"""The draft vocabulary by hand, and its refusal to serve another target or other data."""

from pathlib import Path

import pytest
import torch

from data.batch import Document
from data.chat import Chat
from data.vocabulary import build_vocabulary, find_mask_token, read_vocabulary, vocabulary_text
from recipes.load import RecipeError
from tests.conftest import byte_tokenizer

MADE = {"target": "t1", "training data": "d1"}
# Supervised: 7 7 7 5 5 9; context: 3 3 4.
DOCUMENT = Document("x", torch.tensor([3, 3, 4, 7, 7, 7, 5, 5, 9]), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1]).bool())


@pytest.mark.parametrize(
    ("size", "kept", "coverage"),
    [
        (2, [2, 7], 3 / 6),  # the end-of-sequence token 2 is kept though it never occurs
        (3, [2, 5, 7], 5 / 6),
        (5, [2, 3, 5, 7, 9], 1.0),  # room left over: context by frequency
        (8, [0, 1, 2, 3, 4, 5, 7, 9], 1.0),  # then low ids
        (None, list(range(20)), 1.0),
        (20, list(range(20)), 1.0),
    ],
)
def test_by_hand(size: int | None, kept: list[int], coverage: float) -> None:
    found = build_vocabulary([DOCUMENT], size=size, vocab_size=20, always={2}, made_from=MADE)
    assert found.kept_W.tolist() == kept
    assert found.coverage == pytest.approx(coverage)


def test_too_small() -> None:
    with pytest.raises(RecipeError, match="draft_vocab_size is 1; give at least 2"):
        build_vocabulary([DOCUMENT], size=1, vocab_size=20, always={2}, made_from=MADE)


def test_mask_tokens_by_hand() -> None:
    """Ids 0 to 258 are the tokenizer's, 0 to 2 of them special (0 pads): first the one behind, else a special one that ends nothing
    and occurs nowhere."""
    chat = Chat(byte_tokenizer(), {2})
    assert find_mask_token(chat, [DOCUMENT], vocab_size=320) == 259
    assert find_mask_token(chat, [DOCUMENT], vocab_size=259) == 1
    for busy, docs in ((chat, [DOCUMENT._replace(tokens_T=torch.tensor([1]))]), (Chat(byte_tokenizer(), {1, 2}), [DOCUMENT])):
        with pytest.raises(RecipeError, match="the tokenizer has no reserved token for masks; set mask_token_id"):
            find_mask_token(busy, docs, vocab_size=259)


def test_round_trip_and_refusal(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    made = build_vocabulary([DOCUMENT], size=3, vocab_size=20, always={2}, made_from=MADE)
    path.write_text(vocabulary_text(made))
    read = read_vocabulary(path, made_from=MADE)
    assert read.kept_W.tolist() == made.kept_W.tolist()
    assert read[1:] == made[1:]
    with pytest.raises(RecipeError, match=r"was made for another target \(fingerprint t1, this recipe's is t2\)"):
        read_vocabulary(path, made_from={"target": "t2", "training data": "d1"})
    with pytest.raises(RecipeError, match="was made for another training data"):
        read_vocabulary(path, made_from={"target": "t1", "training data": "d2"})
