"""EAGLE-3 against plain fp64 loops (tests/reference/eagle3.py), and the invariances its maths promise."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.batch import Batch
from data.target_head import TargetHead
from drafters.drafter import FrozenTarget
from drafters.eagle3 import Eagle3Config, Eagle3Drafter, drafting_slots
from eval import plain
from tests.documents import KEPT, MASKS, SHAPE, D, V, make_batch, make_documents
from tests.reference import eagle3 as reference


def make_drafter(**config: Any) -> Eagle3Drafter:
    """A drafter whose every weight is random, in fp64."""
    torch.manual_seed(1)
    target = FrozenTarget(torch.randn(V, D).double(), TargetHead(torch.randn(V, D).double(), None, 1.0, None))
    settings: dict[str, Any] = {"aux_layers": (1, 2, 3), "num_steps": 3, "draft_vocab_size": len(KEPT), **config}
    drafter = Eagle3Drafter(SHAPE, Eagle3Config(**settings), kept_W=KEPT, target=target).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return drafter


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"norm_before_residual": False},
        {"fc_norm": True, "norm_output": True},
        {"num_steps": 5, "step_decay": 0.5},
    ],
)
def test_loss_equals_loops(config: dict[str, Any]) -> None:
    """Loss sum and weight over packed documents with multi-turn masks equal the plain loops over each document alone."""
    drafter = make_drafter(**config)
    assert drafter.teacher is not None
    assert drafter.embedding_VH is not None
    documents = make_documents(MASKS)
    head = TargetHead(full_head(drafter), None, 1.0, None)
    batch = make_batch([documents[:2], documents[2:]], head, pad=3)
    output = drafter(batch)
    plain = reference.Reference(
        drafter.state_dict(),
        SHAPE,
        drafter.embedding_VH,
        norm_before_residual=drafter.config.norm_before_residual,
        norm_output=drafter.config.norm_output,
    )
    total, weight = reference.loss(
        plain,
        documents,
        full_head(drafter),
        KEPT.tolist(),
        num_steps=drafter.config.num_steps,
        step_decay=drafter.config.step_decay,
    )
    assert float(output.weight) == pytest.approx(weight, rel=1e-6)
    # The loss is summed in fp32.
    assert float(output.loss_sum.detach()) == pytest.approx(total, rel=1e-5)
    assert float(drafter.loss_weight(batch)) == float(output.weight)


def full_head(drafter: Eagle3Drafter) -> Tensor:
    """The whole head that make_drafter drew: it is drawn second."""
    torch.manual_seed(1)
    torch.randn(V, D)
    head = torch.randn(V, D).double()
    assert drafter.teacher is not None
    assert torch.equal(head[KEPT], drafter.teacher.weight_VD)
    return head


def gradients(drafter: Eagle3Drafter, batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the gradients of its sum."""
    drafter.zero_grad()
    outputs = [drafter(batch) for batch in batches]
    weight = sum(float(output.weight) for output in outputs)
    total = torch.stack([output.loss_sum for output in outputs]).sum()
    total.backward()
    return float(total.detach()) / weight, {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "arrange",
    [
        pytest.param(lambda d, h: [make_batch([[one] for one in d], h)], id="unpacked"),
        pytest.param(lambda d, h: [make_batch([d], h)], id="one row"),
        pytest.param(lambda d, h: [make_batch([d[:3], d[3:]], h, pad=7)], id="padded"),
        pytest.param(lambda d, h: [make_batch([[one]], h) for one in d], id="accumulated"),
        pytest.param(lambda d, h: [make_batch([d[::-1]], h)], id="reversed"),
    ],
)
def test_arrangement_changes_nothing(
    arrange: Callable[[list[dict[str, Any]], TargetHead], list[Batch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing, padding, order and accumulation leave loss and gradients as they are, to the last digits of fp64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # softmax and losses too, else taken in fp32
    drafter, documents = make_drafter(), make_documents(MASKS)
    head = TargetHead(full_head(drafter), None, 1.0, None)
    loss, grads = gradients(drafter, [make_batch([documents[:2], documents[2:]], head)])
    other_loss, other_grads = gradients(drafter, arrange(documents, head))
    assert other_loss == pytest.approx(loss, rel=1e-6)  # its weight is counted in fp32
    assert grads.keys() == other_grads.keys() == dict(drafter.named_parameters()).keys()
    for name, grad in grads.items():
        torch.testing.assert_close(other_grads[name], grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", ["kl", "ce", "tv", "lk"])
def test_fp32_gradients_are_the_dense_fp64_ones(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1e-5 of each parameter's gradient as dense attention, whole logits and autograd give it in fp64."""
    drafter, documents = make_drafter(loss=loss), make_documents(MASKS)
    batch = make_batch([documents[:2], documents[2:]], TargetHead(full_head(drafter), None, 1.0, None), pad=3)
    assert drafter.teacher is not None
    assert drafter.embedding_VH is not None
    single = copy.deepcopy(drafter).float()
    single.embedding_VH = drafter.embedding_VH.float()
    single.teacher = drafter.teacher._replace(weight_VD=drafter.teacher.weight_VD.float())
    narrow = batch._replace(aux_hidden_BTAD=batch.aux_hidden_BTAD.float(), last_hidden_BTD=batch.last_hidden_BTD.float())
    _, found = gradients(single, [narrow])
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr("drafters.eagle3.attend", plain.attend)
        patch.setattr("drafters.eagle3.head_loss", plain.head_loss)
        _, expected = gradients(drafter, [batch])
    for name, grad in expected.items():
        assert float((found[name].double() - grad).norm() / grad.norm()) < 1e-5, name


def test_loss_has_the_gradient_of_finite_differences() -> None:
    """Moving the weights along the gradient changes the loss as the gradient says."""
    drafter, documents = make_drafter(loss="tv"), make_documents(MASKS)
    batch = make_batch([documents], TargetHead(full_head(drafter), None, 1.0, None))
    # Not lk: its mixing weight is detached, so its gradient is not its own slope.
    for name in ("kl", "tv"):
        drafter.config = replace(drafter.config, loss=name)  # type: ignore[arg-type]
        _, grads = gradients(drafter, [batch])
        grads = {key: grad / float(drafter.loss_weight(batch)) for key, grad in grads.items()}
        step = 1e-3 / sum(float(g.square().sum()) for g in grads.values()) ** 0.5
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for key, parameter in drafter.named_parameters():
                    parameter += sign * step * grads[key]
                output = drafter(batch)
                values.append(float(output.loss_sum / output.weight))
                for key, parameter in drafter.named_parameters():
                    parameter -= sign * step * grads[key]
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx(sum(float(g.square().sum()) for g in grads.values()), rel=2e-2), name


def test_unsupervised_batch_gives_zero_loss_and_zero_gradients() -> None:
    """A rank whose rows hold no label takes part with zeros: no NaN, no missing gradient."""
    drafter = make_drafter()
    batch = make_batch([make_documents(["....", "x.x"])], TargetHead(full_head(drafter), None, 1.0, None))
    output = drafter(batch)
    output.loss_sum.backward()
    assert float(output.weight) == 0.0
    assert all(p.grad is not None and float(p.grad.abs().sum()) == 0.0 for p in drafter.parameters())


def test_slots_and_labels_by_hand() -> None:
    """Document "..xxxx" then ".xx.xxx": slots are those whose next two tokens are supervised, and labels never cross a border."""
    drafter = make_drafter()
    batch = make_batch([make_documents(["..xxxx", ".xx.xxx"])], TargetHead(full_head(drafter), None, 1.0, None))
    slots = drafting_slots(batch.text)
    # Tokens   0 1 2 3 4 5 | 6 7 8 9 10 11 12, supervised 2 3 4 5 | 7 8 . 10 11 12.
    assert slots.index_M.tolist() == [1, 2, 3, 6, 9, 10]
    assert drafter.labels(batch).valid_MK.int().tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("config", [{}, {"norm_before_residual": False, "norm_output": True, "fc_norm": True}])
def test_propose_equals_plain_draft(config: dict[str, Any]) -> None:
    """Drafts made behind all prefixes side by side equal those of the one-token-at-a-time decode behind each."""
    drafter, documents = make_drafter(**config), make_documents(MASKS)
    head = TargetHead(full_head(drafter), None, 1.0, None)
    batch = make_batch([documents[:2], documents[2:]], head, pad=2)
    proposals = drafter.propose(batch, num_drafts=5)
    rows = [documents[:2], documents[2:]]
    compared = 0
    for b, row in enumerate(rows):
        start = 0
        for document in row:
            end = start + len(document["tokens"])
            for of, newest, drafts in zip(*(x.tolist() for x in (*proposals.newest, proposals.drafts_MK)), strict=True):
                if of == b and start <= newest < end:
                    prefix = document["tokens"][: newest - start + 1]
                    assert drafts == drafter.draft(prefix, document["aux_TAD"][: len(prefix) - 1], num_drafts=5)
                    compared += 1
            start = end
    assert compared == len(proposals.drafts_MK) == 13


def test_draft_follows_loops() -> None:
    """The plain decode's first draft is the most likely token of the reference's step 0, and so on along its own drafts."""
    drafter = make_drafter()
    assert drafter.embedding_VH is not None
    (document,) = make_documents([".xxxxxxx"])
    plain = reference.Reference(drafter.state_dict(), SHAPE, drafter.embedding_VH, norm_before_residual=True, norm_output=False)
    for newest in (1, 4):
        tokens = document["tokens"][: newest + 1]
        drafts: list[int] = []
        for k in range(4):
            logits = plain.logits(tokens + drafts, document["aux_TAD"], newest - 1, k + 1)[k]
            drafts.append(int(KEPT[logits.argmax()]))
        assert drafter.draft(tokens, document["aux_TAD"][:newest], num_drafts=4) == drafts


def test_expected_length_equals_loops() -> None:
    """1 + sum over k of the product of the sums of min(p, q), behind every prefix of two tokens or more that goes on for three; p
    is over the whole vocabulary, the tokens before each draft are the text's own."""
    drafter, documents = make_drafter(), make_documents(MASKS)
    assert drafter.embedding_VH is not None
    head = TargetHead(full_head(drafter), None, 1.0, None)
    total, count = drafter.expected_length(make_batch([documents[:2], documents[2:]], head, pad=2), head, num_drafts=3)
    plain = reference.Reference(drafter.state_dict(), SHAPE, drafter.embedding_VH, norm_before_residual=True, norm_output=False)
    lengths = []
    for document in documents:
        for newest in range(1, len(document["tokens"]) - 3):
            if not all(document["mask"][newest : newest + 4]):
                continue
            length = reached = 1.0
            for k, logits in enumerate(plain.logits(document["tokens"], document["aux_TAD"], newest - 1, 3)):
                target = torch.softmax(head.weight_VD @ document["last_TD"][newest + k], 0)[KEPT]
                reached *= float(torch.minimum(torch.softmax(logits, 0), target).sum())
                length += reached
            lengths.append(length)
    assert int(count) == len(lengths)
    assert float(total) == pytest.approx(sum(lengths), rel=1e-5)
