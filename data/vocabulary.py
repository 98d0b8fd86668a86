"""The draft vocabulary: the target tokens a drafter can propose, chosen by how often the target produced them."""

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.conversations import Document
from recipes.load import RecipeError


class DraftVocabulary(NamedTuple):
    """kept_W: int64 target ids, ascending. coverage: share of the supervised tokens it was counted on that it holds.
    made_from: fingerprints of the target and of those conversations."""

    kept_W: Tensor
    coverage: float
    made_from: dict[str, str]


def build_vocabulary(
    docs: list[Document], *, size: int | None, vocab_size: int, always: set[int], made_from: dict[str, str]
) -> DraftVocabulary:
    """The ``size`` most frequent supervised tokens; all of the target's when size is None.

    ``always`` (end-of-sequence ids) are kept whatever their count. Room left over goes to unsupervised tokens of the same
    conversations by frequency, then to low ids, which byte-pair tokenizers give to common pieces. Ties go to the lower id.
    """
    if size is None or size >= vocab_size:
        return DraftVocabulary(torch.arange(vocab_size), 1.0, made_from)
    if size < len(always) + 1:
        raise RecipeError(f"draft_vocab_size is {size}; give at least {len(always) + 1}")
    supervised: Counter[int] = Counter()
    context: Counter[int] = Counter()
    for document in docs:
        supervised.update(document.tokens_T[document.loss_mask_T].tolist())
        context.update(document.tokens_T[~document.loss_mask_T].tolist())
    ranked = sorted(range(vocab_size), key=lambda t: (t not in always, -supervised[t], -context[t], t))
    kept = sorted(ranked[:size])
    held = sum(supervised[token] for token in kept)
    return DraftVocabulary(torch.tensor(kept), held / max(supervised.total(), 1), made_from)


def find_mask_token(tokenizer: PreTrainedTokenizerBase, docs: list[Document], *, vocab_size: int) -> int:
    """A token id inside the target's embedding that no text holds: the first behind the tokenizer's own, which many embeddings
    are padded to; else the last special token that ends nothing and occurs in none of the conversations."""
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    seen = {token for document in docs for token in document.tokens_T.unique().tolist()}
    seen |= {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    if free := sorted(set(tokenizer.added_tokens_decoder) - seen):
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
