"""Features of documents on disk: the target runs over them once, in as many processes as there are, and training needs no target.

    <folder>/store.json                    what made them: the target, its layers, its dtype
             frozen.safetensors            the target's embedding and head, which drafters read
             <writer>-000000.safetensors   features of many documents, one behind the other
             <writer>.jsonl                a line for each: a hash of its tokens, shard, first row, number of rows

A shard is written aside, synced and renamed, and only then are its documents listed: what is listed is whole, whatever was killed.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from data.batch import Batch, Document
from data.target_head import TargetHead
from data.teacher import Features, assemble, text_argmax
from recipes.files import drop_half_line, explain_full_disk, lock, sync
from recipes.load import RecipeError

SHARD_BYTES = 1 << 30
"""A shard is written when it has so many; until then its features are held in memory."""


class Place(NamedTuple):
    """Where a document's features are."""

    shard: str
    start: int
    length: int


def key_of(document: Document) -> str:
    """32 hexadecimal digits of what features depend on: the token ids, and which of them are supervised. (A document's id
    stays when a template or a limit changes the tokens.)"""
    digest = hashlib.blake2b(document.tokens_T.numpy().tobytes(), digest_size=16)
    digest.update(document.loss_mask_T.numpy().tobytes())
    return digest.hexdigest()


def bytes_per_token(num_layers: int, width: int, dtype: str) -> int:
    """What a token takes: the aux layers, the last one, and the most likely next token."""
    return (num_layers + 1) * width * int(getattr(torch, dtype).itemsize) + 4


def places(folder: Path) -> dict[str, Place]:
    """Where the features of every document of a store are, by its key."""
    return {row[0]: Place(*row[1:]) for index in sorted(folder.glob("*.jsonl")) for row in _listed(index)}


def _listed(index: Path) -> list[list[Any]]:
    return [json.loads(line) for line in index.read_text().split("\n")[:-1]]  # behind the last break, what a kill cut short


class StoreWriter:
    """Adds documents to a store. writer: a name that no other process writing there has. description: what store.json says; where
    it says something else already, RecipeError."""

    def __init__(self, folder: Path, writer: str, description: dict[str, Any]) -> None:
        self.folder, self.writer = folder, writer
        self.waiting: list[tuple[Document, Features]] = []
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "store.json"
        if not path.is_file():
            aside = folder / f".store-{writer}.partial"  # others may begin at the same moment, and say the same
            aside.write_text(json.dumps(description))
            aside.rename(path)
        check_made_by(folder, description)
        path = folder / f"{writer}.jsonl"
        self.index = path.open("a")
        lock(self.index, path)
        drop_half_line(path)
        # A shard that is not listed was written by a process that was killed then; it is written over.
        self.shards = 1 + max((int(Path(row[1]).stem.rpartition("-")[2]) for row in _listed(path)), default=-1)

    def add(self, documents: Sequence[Document], features: Sequence[Features]) -> None:
        """Takes in the features of documents; RecipeError where they cannot be right."""
        _check(documents, features)
        self.waiting += zip(documents, features, strict=True)
        if sum(held.num_bytes() for _, held in self.waiting) >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what waits."""
        if not self.waiting:
            return
        shard, lines, start = f"{self.writer}-{self.shards:06d}.safetensors", [], 0
        for document, _ in self.waiting:
            length = len(document.tokens_T)
            lines.append(json.dumps([key_of(document), shard, start, length]) + "\n")
            start += length
        aux, last, argmax = (torch.cat([part.cpu() for part in parts]) for parts in zip(*(f for _, f in self.waiting), strict=True))
        aside = self.folder / f".{shard}.partial"
        with explain_full_disk(aside):
            save_file({"aux_hidden": aux, "last_hidden": last, "argmax": argmax.to(torch.int32)}, aside)
            sync(aside)
            aside.rename(self.folder / shard)
            self.index.write("".join(lines))
            self.index.flush()
            os.fsync(self.index.fileno())
        self.waiting, self.shards = [], self.shards + 1

    def close(self) -> None:
        """Writes what waits, and lets others write under this name."""
        self.flush()
        self.index.close()


def _check(documents: Sequence[Document], features: Sequence[Features]) -> None:
    """RecipeError for states that are too few, no numbers, all zero, or another layer's: what a wrong hook or engine gives."""
    for document, found in zip(documents, features, strict=True):
        length = len(document.tokens_T)
        if any(len(part) != length for part in found):
            raise RecipeError(f"the engine gave {[len(part) for part in found]} states of the {length} tokens of {document.id}")
        layers = [*found.aux_hidden_TAD.unbind(1), found.last_hidden_TD]
        names = [f"aux layer {i}" for i in range(len(layers) - 1)] + ["the last hidden state"]
        for i, (name, layer) in enumerate(zip(names, layers, strict=True)):
            if not layer.isfinite().all():
                raise RecipeError(f"{name} of document {document.id} is not finite; try target.dtype: float32")
            if not layer.any():
                raise RecipeError(f"{name} of document {document.id} is all zero; the engine does not give that layer")
            if same := next((names[k] for k in range(i) if torch.equal(layer, layers[k])), None):
                raise RecipeError(f"{name} of document {document.id} is that of {same}; the engine gives a layer twice")


def check_made_by(folder: Path, description: dict[str, Any]) -> None:
    """RecipeError unless a store was made as described."""
    path = folder / "store.json"
    if not path.is_file():
        raise RecipeError(f"{folder} is no store of features (no store.json); make one with: python data/capture.py <recipe>")
    there = json.loads(path.read_text())
    for key, value in description.items():
        if there.get(key) != value:
            raise RecipeError(f"{folder} has {key} {there.get(key)}, but this recipe has {value}; give another folder")


class StoredTeacher:
    """What OnlineTeacher gives, read from a store. aux_layers: of those it holds, the ones wanted."""

    work = 0.0

    def __init__(self, folder: Path, aux_layers: tuple[int, ...], *, target: str, dtype: str, device: torch.device) -> None:
        check_made_by(folder, {"target": target, "dtype": dtype})
        made = json.loads((folder / "store.json").read_text())
        held = made["aux_layers"]
        if missing := sorted(set(aux_layers) - set(held)):
            fix = f"python data/capture.py <recipe> --out <folder> --aux-layers {' '.join(map(str, aux_layers))}"
            raise RecipeError(f"{folder} has layers {held}, not {missing}; make another with: {fix}")
        self.folder, self.device = folder, device
        self.layers = [held.index(layer) for layer in aux_layers]
        self.places = places(folder)
        frozen = load_file(folder / "frozen.safetensors", device=str(device))
        self.head = TargetHead(frozen["head"], frozen.get("bias"), made["logits"]["scale"], made["logits"]["soft_cap"])
        self.embedding_VH = frozen["embedding"]
        self.shards: dict[str, Any] = {}
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="features")
        self.coming: dict[str, Future[Features]] = {}

    def batch(self, rows: list[list[Document]], seeds: list[int] | None = None) -> Batch:
        """The packed rows [B, T] with their features, on the device. seeds: Text.seed_B, 0 where not given."""
        return assemble(rows, self.features([document for row in rows for document in row]), self.device, seeds)

    def expect(self, documents: Iterable[Document]) -> None:
        """Begins to read what will be asked for next."""
        for document in documents:
            if document.id not in self.coming:
                self.coming[document.id] = self.reader.submit(self._read, document)

    def features(self, documents: list[Document]) -> list[Features]:
        """Features of documents; RecipeError for one that the store has not."""
        self.expect(documents)
        found = [self.coming[document.id].result() for document in documents]
        for document in documents:
            self.coming.pop(document.id, None)
        return found

    def keep(self, documents: list[Document], *, budget_bytes: int, show: bool) -> None:
        """Nothing: the system keeps in memory what is read often."""

    def require(self, documents: Iterable[Document]) -> None:
        """RecipeError unless the features of all of them are there, before a run that would miss them on its way."""
        missing = [document.id for document in documents if key_of(document) not in self.places]
        if missing:
            raise RecipeError(
                f"{self.folder} lacks {len(missing)} documents of this recipe, {missing[0]} for one; go on with: "
                f"python data/capture.py <recipe> --out {self.folder}"
            )

    def _read(self, document: Document) -> Features:
        key = key_of(document)
        if key not in self.places:
            self.require([document])
        found = self.stored(key)
        # A greedy text says what is most likely, whatever the store has been told.
        return found._replace(argmax_T=text_argmax(document)) if document.greedy else found

    def stored(self, key: str) -> Features:
        """What is stored of a document."""
        place = self.places[key]
        if place.shard not in self.shards:
            self.shards[place.shard] = safe_open(self.folder / place.shard, "pt")
        part = slice(place.start, place.start + place.length)
        aux, last, argmax = (self.shards[place.shard].get_slice(name)[part] for name in ("aux_hidden", "last_hidden", "argmax"))
        return Features(aux[:, self.layers], last, argmax.long())


def save_frozen(folder: Path, writer: str, target: PreTrainedModel) -> None:
    """Writes what a drafter needs of the target itself; every writer the same."""
    embedding, head = target.get_input_embeddings(), TargetHead.of(target)
    assert isinstance(embedding, nn.Embedding)
    tensors = {"embedding": embedding.weight, "head": head.weight_VD} | ({} if head.bias_V is None else {"bias": head.bias_V})
    aside = folder / f".frozen-{writer}.partial"
    with explain_full_disk(aside):
        save_file({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, aside)
        sync(aside)
        aside.rename(folder / "frozen.safetensors")
