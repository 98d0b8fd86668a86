"""Shows what a drafter would learn from: one conversation in colours, and the whole set in numbers.

    python data/preview.py recipes/smollm2_cpu.yaml
    python data/preview.py recipes/smollm2_cpu.yaml --row 7

Before a training run, look whether what is supervised is what the target said, and all of it.
"""

import os
import sys

import torch

from data.batch import Document
from data.chat import Chat
from data.conversations import DataRecipe
from data.documents import Documents, DocumentSet, open_documents
from data.target import resolve_target, target_fingerprint
from data.vocabulary import count_tokens
from recipes.load import RecipeError, load_recipe, recipe_arguments, run_script

ANGLES = "\u00ab\u00bb"
SUPERVISED, CONTEXT, SPECIAL, CUT, OFF = "\033[1;32m", "\033[2m", "\033[35m", "\033[41m", "\033[0m"


def coloured(chat: Chat, document: Document, *, cut: bool, colour: bool) -> str:
    """The document's text; without colours, what is supervised stands between double angles. cut: there was more of it."""
    tokens, mask = document.tokens_T.tolist(), document.loss_mask_T.tolist()
    special = chat.tokenizer.added_tokens_decoder
    runs: list[tuple[bool, bool, list[int]]] = []
    for token, on in zip(tokens, mask, strict=True):
        kind = (on, token in special)
        if not runs or runs[-1][:2] != kind:
            runs.append((*kind, []))
        runs[-1][2].append(token)
    text, before = "", False
    for on, is_special, run in runs:
        words = str(chat.tokenizer.decode(run, skip_special_tokens=False))
        if colour:
            text += (SPECIAL if is_special else "") + (SUPERVISED if on else CONTEXT) + words + OFF
        else:
            text += (ANGLES[0] if on and not before else ANGLES[1] if before and not on else "") + words
        before = on
    text += ANGLES[1] if before and not colour else ""
    if cut:
        text += f"{CUT if colour else ''}[what follows is behind data.max_length]{OFF if colour else ''}"
    return text


def table(documents: Documents, found: DocumentSet, *, vocab_size: int, eos: set[int]) -> list[str]:
    """Lines that describe the training documents: sizes, lengths, what was left out, what a draft vocabulary would hold."""
    supervised = answers = unended = 0
    for document in documents:
        mask_T = document.loss_mask_T
        supervised += int(mask_T.sum())
        answers += int((mask_T[1:] & ~mask_T[:-1]).sum()) + int(mask_T[0])
        last_T = mask_T & ~torch.cat((mask_T[1:], mask_T.new_zeros(1)))
        unended += sum(token not in eos for token in document.tokens_T[last_T].tolist())
    lengths = torch.tensor(documents.lengths)
    total = int(lengths.sum())
    sizes = ", ".join(f"{number} {split}" for split, number in found.sizes().items())
    lines = [
        f"{found.num_rows} rows, {len(found.table)} documents: {sizes}; for training:",
        f"{len(documents)} documents, {answers} answers, {total} tokens, {supervised / max(total, 1):.1%} of them supervised",
        f"{unended} answers without an end: cut at data.answers.max_tokens or data.max_length",
        f"tokens of a document: median {int(lengths.median())}, longest {int(lengths.max())}",
        *histogram(lengths),
    ]
    supervised_V, _ = count_tokens(documents, vocab_size=vocab_size)
    ranked = supervised_V.sort(descending=True).values.cumsum(0)
    held = [f"{size}: {float(ranked[min(size, vocab_size) - 1]) / max(supervised, 1):.2%}" for size in (2048, 8192, 16384, 32768)]
    lines.append(f"a draft vocabulary would hold, by size: {', '.join(held)} of the supervised tokens")
    lines += [f"left out: {line}" for line in found.left_out]
    return lines


def histogram(lengths: torch.Tensor, *, width: int = 40) -> list[str]:
    """A bar per power of two."""
    power = lengths.clamp_min(1).log2().floor().long()
    counts = torch.bincount(power)
    most = int(counts.max())
    first = int(power.min())
    return [
        f"{2**p:>8} .. {2 ** (p + 1) - 1:<8} {'#' * max(1, round(width * int(n) / most)) if n else '':<{width}} {int(n)}"
        for p, n in enumerate(counts)
        if p >= first
    ]


def main() -> None:
    parser = recipe_arguments(__doc__)
    parser.add_argument("--row", type=int, default=0, help="the training document to show, from 0; default %(default)s")
    arguments = parser.parse_intermixed_args()
    recipe = load_recipe(arguments.recipe, DataRecipe, arguments.overrides)
    folder = resolve_target(recipe.target)
    chat = Chat.load(folder, recipe.data.chat_template_kwargs)
    found = open_documents(recipe.data, recipe.name, chat=chat, target=target_fingerprint(folder))
    documents = found.split("train")
    if not 0 <= arguments.row < len(documents):
        raise RecipeError(f"--row is {arguments.row}, but there are {len(documents)} training documents, counted from 0")
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if colour:
        print(f"{SUPERVISED}supervised{OFF} {CONTEXT}read only{OFF} {SPECIAL}special tokens{OFF} {CUT}cut{OFF}\n")
    print(f"training document {arguments.row} of {len(documents)}, in no file's order: {documents.where(arguments.row)}")
    print(coloured(chat, documents[arguments.row], cut=documents.cut[arguments.row], colour=colour))
    print()
    print("\n".join(table(documents, found, vocab_size=max(len(chat.tokenizer), chat.tokenizer.vocab_size), eos=chat.eos)))


if __name__ == "__main__":
    run_script(main)
