"""The draft vocabulary: the target tokens a drafter can propose, chosen by how often the target produced them."""

import json
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from data.batch import Document
from data.chat import Chat
from recipes.load import RecipeError

ENOUGH = 0.97
"""Share of the target's tokens that a draft vocabulary should hold."""


class DraftVocabulary(NamedTuple):
    """kept_W: int64 target ids, ascending. coverage: share of the supervised tokens it was counted on that it holds.
    made_from: fingerprints of the target and of those conversations."""

    kept_W: Tensor
    coverage: float
    made_from: dict[str, str]


def build_vocabulary(
    docs: Iterable[Document], *, size: int | None, vocab_size: int, always: set[int], made_from: dict[str, str]
) -> DraftVocabulary:
    """The ``size`` most frequent supervised tokens; all of the target's when size is None.

    ``always`` (end-of-sequence ids, the tokens of tool calls) are kept whatever their count. Room left over goes to unsupervised
    tokens of the same conversations by frequency, then to low ids, which byte-pair tokenizers give to common pieces. Ties go to
    the lower id.
    """
    if size is None or size >= vocab_size:
        return DraftVocabulary(torch.arange(vocab_size), 1.0, made_from)
    if size < len(always) + 1:
        raise RecipeError(f"draft_vocab_size is {size}; give at least {len(always) + 1}")
    supervised_V, context_V = count_tokens(docs, vocab_size=vocab_size)
    ranked = sorted(range(vocab_size), key=lambda t: (t not in always, -int(supervised_V[t]), -int(context_V[t]), t))
    kept_W = torch.tensor(sorted(ranked[:size]))
    coverage = int(supervised_V[kept_W].sum()) / max(int(supervised_V.sum()), 1)
    if coverage < ENOUGH:
        print(
            f"draft_vocab_size = {size} holds only {coverage:.1%} of the tokens the target says; below {ENOUGH:.0%} a larger one "
            "may be worth its time",
            file=sys.stderr,
        )
    return DraftVocabulary(kept_W, coverage, made_from)


def count_tokens(docs: Iterable[Document], *, vocab_size: int) -> tuple[Tensor, Tensor]:
    """How often each token [V] is supervised, and how often only read."""
    supervised_V, context_V = torch.zeros(vocab_size, dtype=torch.int64), torch.zeros(vocab_size, dtype=torch.int64)
    documents = iter(docs)
    while group := list(islice(documents, 1024)):  # counting costs as much as the vocabulary is large: not for each document
        tokens, mask = (torch.cat(parts) for parts in zip(*((d.tokens_T, d.loss_mask_T) for d in group), strict=True))
        supervised_V += torch.bincount(tokens[mask], minlength=vocab_size)
        context_V += torch.bincount(tokens[~mask], minlength=vocab_size)
    return supervised_V, context_V


def kept_always(chat: Chat, *, vocab_size: int) -> set[int]:
    """Tokens a draft vocabulary keeps however rare they are: what ends an answer, and the tokenizer's added ones that a template
    puts into answers or tools into calls, for where these come, they come with certainty."""
    added = set(chat.tokenizer.added_tokens_decoder)
    named = {id for id, token in chat.tokenizer.added_tokens_decoder.items() if token.content in chat.template}
    return {id for id in chat.eos | (added & named) if id < vocab_size}


def find_mask_token(chat: Chat, docs: Iterable[Document], *, vocab_size: int) -> int:
    """A token id inside the target's embedding that no text holds: the first behind the tokenizer's own, which many embeddings
    are padded to; else the last special token that ends nothing and occurs in none of the conversations."""
    tokenizer = chat.tokenizer
    behind = max(tokenizer.get_vocab().values()) + 1
    if behind < vocab_size:
        return int(behind)
    seen = {token for document in docs for token in document.tokens_T.unique().tolist()}
    seen |= chat.eos | {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    if free := sorted(token for token in set(tokenizer.added_tokens_decoder) - seen if token < vocab_size):
        return free[-1]
    raise RecipeError(
        "the tokenizer has no reserved token for masks; set mask_token_id to a token that no text holds, or, for dflash, to a rare "
        "one, with own_mask_embedding: true"
    )


def vocabulary_text(vocabulary: DraftVocabulary) -> str:
    """The text of vocabulary.json."""
    return json.dumps({**vocabulary._asdict(), "kept_W": vocabulary.kept_W.tolist()})


def read_vocabulary(path: Path, *, made_from: dict[str, str] | None = None) -> DraftVocabulary:
    """The vocabulary in ``path``; RecipeError when it was not made from what ``made_from`` names."""
    content = json.loads(path.read_text())
    for what, fingerprint in (made_from or {}).items():
        if (seen := content["made_from"].get(what)) != fingerprint:
            raise RecipeError(
                f"{path} was made for another {what} (fingerprint {seen}, this recipe's is {fingerprint}); "
                "give this run a train.tag, or delete that folder"
            )
    return DraftVocabulary(torch.tensor(content["kept_W"]), content["coverage"], content["made_from"])
