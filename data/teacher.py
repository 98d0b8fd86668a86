"""The online teacher: the frozen target in this process, run over documents for the features a drafter learns from.

Every document is run alone, padded on the right: in a causal model no token sees what comes after it, so neither padding nor
a neighbour in the packed row can touch a feature, whatever the target's attention looks like.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils

from data.batch import Batch, Document, Text, to_device
from data.packing import collate
from data.target_head import TargetHead
from data.target_model import target_sizes
from recipes.load import RecipeError
from recipes.progress import progress_bar

GROUP = 8
"""Documents in one forward of the target."""


class Features(NamedTuple):
    """What one document of T tokens teaches: aux_hidden_TAD, last_hidden_TD (input of lm_head), argmax_T (see Batch)."""

    aux_hidden_TAD: Tensor
    last_hidden_TD: Tensor
    argmax_T: Tensor

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self)


def check_aux_layers(ids: tuple[int, ...], num_layers: int) -> None:
    """RecipeError unless the ids are states 0..num_layers of the target (k: after k decoder layers), ascending."""
    for layer in ids:
        if not 0 <= layer <= num_layers:
            raise RecipeError(f"aux_layers has {layer}, but the target has states 0..{num_layers} (0: the embeddings); give those")
    if not ids or list(ids) != sorted(set(ids)):
        raise RecipeError(f"aux_layers is {list(ids)}; give one id or more, ascending, as vLLM reads them")


class Teacher(Protocol):
    """Where features come from. work: FLOPs of the target's matrix products so far."""

    @property
    def head(self) -> TargetHead: ...
    @property
    def work(self) -> float: ...
    def batch(self, rows: list[list[Document]], seeds: list[int] | None = None) -> Batch: ...
    def expect(self, docs: Iterable[Document]) -> None: ...
    def keep(self, docs: list[Document], *, budget_bytes: int, show: bool) -> None: ...


class OnlineTeacher:
    """Features of documents from a frozen transformers model. together: other processes hold parts of it; all have to ask for
    features equally often, of however many documents."""

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...], *, together: bool = False) -> None:
        self.model = model
        # Of the hosts alone: they agree on numbers that devices need not be waited for.
        self.hosts = dist.new_group(backend="gloo") if together else None
        self.head = TargetHead.of(model)
        self.aux_layers = aux_layers
        self.kept: dict[str, Features] = {}
        self.work, self.work_per_token = 0.0, target_sizes(model.config).work_per_token
        self._captured: dict[int, Tensor] = {}
        layers = model.get_decoder().layers
        for layer in aux_layers:
            if layer < len(layers):  # the state after k layers is what layer index k reads
                layers[layer].register_forward_pre_hook(self._keep_input(layer), with_kwargs=True)
            else:
                layers[layer - 1].register_forward_hook(self._keep_output(layer))

    def _keep_input(self, layer: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._captured[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _keep_output(self, layer: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def batch(self, rows: list[list[Document]], seeds: list[int] | None = None) -> Batch:
        """The packed rows [B, T] with their features, on the target's device. seeds: Text.seed_B, 0 where not given."""
        return assemble(rows, self.features([document for row in rows for document in row]), self.model.device, seeds)

    def expect(self, docs: Iterable[Document]) -> None:
        """Nothing: features are computed when they are asked for."""

    def keep(self, docs: list[Document], *, budget_bytes: int, show: bool) -> None:
        """Runs the target over documents and keeps their features in the host's memory, as many as fit the budget.

        Which are kept, and which share a forward, is a function of the documents alone: a matrix product's last bits depend on
        its neighbours, and a resumed run must see what the unbroken one saw. show: a progress bar.
        """
        ordered = sorted(docs, key=lambda document: (len(document.tokens_T), document.id))
        total = sum(len(document.tokens_T) for document in docs)
        with progress_bar(total=total, desc="target features", unit="token", disable=not show) as bar:
            for start in range(0, len(ordered), GROUP):
                group = ordered[start : start + GROUP]
                found = self._forward(group)
                budget_bytes -= sum(features.num_bytes() for features in found)
                if budget_bytes < 0:
                    return
                for document, features in zip(group, found, strict=True):
                    self.kept[document.id] = Features(*(tensor.cpu() for tensor in features))
                bar.update(sum(len(document.tokens_T) for document in group))

    def features(self, docs: list[Document]) -> list[Features]:
        """Features of documents, from memory where they are kept there."""
        missing = [document for document in docs if document.id not in self.kept]
        fresh: dict[str, Features] = {}
        # Neighbours in length share a forward, so that little of it is padding.
        missing.sort(key=lambda document: len(document.tokens_T))
        groups = [missing[start : start + GROUP] for start in range(0, len(missing), GROUP)]
        if self.hosts is not None:
            most = torch.tensor(len(groups))
            dist.all_reduce(most, dist.ReduceOp.MAX, self.hosts)
            filler = Document("", torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool))
            groups += [[filler]] * (int(most) - len(groups))
        for group in groups:
            fresh |= {document.id: features for document, features in zip(group, self._forward(group), strict=True)}
        return [fresh[document.id] if document.id in fresh else self.kept[document.id] for document in docs]

    @torch.no_grad()
    def _forward(self, docs: list[Document]) -> list[Features]:
        tokens_BT = to_device(collate([[document.tokens_T] for document in docs], fill=0), self.model.device)
        with one_document_a_row():
            last_BTD = self.model.get_decoder()(input_ids=tokens_BT, use_cache=False).last_hidden_state
        aux_BTAD = torch.stack([self._captured.pop(layer) for layer in self.aux_layers], dim=2)
        out = []
        for b, document in enumerate(docs):
            length, judged = len(document.tokens_T), 0 if document.greedy else int(document.loss_mask_T[1:].sum())
            self.work += length * self.work_per_token + 2.0 * judged * self.head.weight_VD.numel()
            last_TD = last_BTD[b, :length].clone()
            out.append(Features(aux_BTAD[b, :length].clone(), last_TD, judged_argmax(self.head, document, last_TD)))
        return out


@contextmanager
def one_document_a_row() -> Iterator[None]:
    """A forward in here does not wait for the device to see whether its rows are packed, which transformers else looks for in the
    positions of each."""
    looking = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looking


def judged_argmax(head: TargetHead, document: Document, last_TD: Tensor) -> Tensor:
    """Features.argmax_T of a document whose last hidden states are there. Its text says it, if it is greedy: without a product with
    all of the head, and as it was served, where two tokens are nearly as likely."""
    said_T = text_argmax(document)
    argmax_T = to_device(said_T, last_TD.device)
    if document.greedy:
        return argmax_T
    judged_R = to_device((said_T >= 0).nonzero()[:, 0], last_TD.device)
    return argmax_T.index_copy(0, judged_R, head.argmax(last_TD[judged_R]))


def text_argmax(document: Document) -> Tensor:
    """The next token, where it is the target's, else -1: Features.argmax_T of a greedy document."""
    argmax_T = torch.full_like(document.tokens_T, -1)
    argmax_T[:-1] = torch.where(document.loss_mask_T[1:], document.tokens_T[1:], -1)
    return argmax_T


def assemble(rows: list[list[Document]], features: list[Features], device: torch.device, seeds: list[int] | None) -> Batch:
    """Packed rows [B, T] of documents with their features, in the rows' order. seeds: Text.seed_B, 0 where None."""
    found = iter(features)
    of_rows = [[Features(*(to_device(x, device) for x in next(found))) for _ in row] for row in rows]
    text = Text(
        tokens_BT=collate([[d.tokens_T for d in row] for row in rows], fill=0),
        document_ids_BT=collate([[torch.full_like(d.tokens_T, i) for i, d in enumerate(row)] for row in rows], fill=-1),
        positions_BT=collate([[torch.arange(len(d.tokens_T)) for d in row] for row in rows], fill=0),
        loss_mask_BT=collate([[d.loss_mask_T for d in row] for row in rows], fill=False),
        seed_B=torch.tensor(seeds or [0] * len(rows)),
    )
    return Batch(
        text,
        aux_hidden_BTAD=collate([[f.aux_hidden_TAD for f in row] for row in of_rows], fill=0.0),
        last_hidden_BTD=collate([[f.last_hidden_TD for f in row] for row in of_rows], fill=0.0),
        argmax_BT=collate([[f.argmax_T for f in row] for row in of_rows], fill=-1),
    )
