"""Small random documents and packed batches of them, for the drafters' tests."""

from typing import Any

import torch

from data.batch import Batch, Text
from data.target_head import TargetHead
from drafters.layers import DrafterShape

V, D, A = 40, 24, 3
SHAPE = DrafterShape(
    hidden_size=D,
    intermediate_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=V,
    num_target_layers=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
)
KEPT = torch.arange(0, V, 2)
MASKS = ["..xxxxxx", ".xxx..xxxx", "...", "....x", "xxxx", "..xx"]


def make_documents(masks: list[str]) -> list[dict[str, Any]]:
    """Random documents; masks such as "..xxx": x where the target produced the token."""
    torch.manual_seed(2)
    documents = []
    for mask in masks:
        length = len(mask)
        documents.append(
            {
                "tokens": torch.randint(V, (length,)).tolist(),
                "mask": [letter == "x" for letter in mask],
                "aux_TAD": torch.randn(length, A, D).double(),
                "last_TD": torch.randn(length, D).double(),
            }
        )
    return documents


def make_batch(rows: list[list[dict[str, Any]]], head: TargetHead, *, pad: int = 0) -> Batch:
    """Packed rows of documents, padded to the longest row plus ``pad``; padding is filled with rubbish."""
    length = max(sum(len(d["tokens"]) for d in row) for row in rows) + pad
    tokens = torch.randint(V, (len(rows), length))
    documents = torch.full((len(rows), length), -1)
    positions = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    aux, last = torch.randn(len(rows), length, A, D).double(), torch.randn(len(rows), length, D).double()
    argmax = torch.full((len(rows), length), -1)
    for b, row in enumerate(rows):
        start = 0
        for i, document in enumerate(row):
            here = slice(start, start + len(document["tokens"]))
            tokens[b, here], documents[b, here] = torch.tensor(document["tokens"]), i
            positions[b, here], mask[b, here] = torch.arange(len(document["tokens"])), torch.tensor(document["mask"])
            aux[b, here], last[b, here] = document["aux_TAD"], document["last_TD"]
            argmax[b, here] = head.argmax(document["last_TD"])
            start = here.stop
    text = Text(tokens, documents, positions, mask, torch.zeros(len(rows), dtype=torch.int64))
    return Batch(text, aux, last, argmax)
