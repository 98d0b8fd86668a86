"""Attention in parts against dense softmax, values and gradients; and the GPU's way as far as it can be followed without one."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from drafters import flash as kernels
from drafters.attention import attend, block_context, own_mask, slot_stretches
from drafters.flash import flash, flash_backward
from drafters.slots import Places
from tests.sizes import Sizes

N, G, C = 6, 2, 16
OWN = tuple[Tensor, Tensor]


def dense(query: Tensor, shared: OWN, row: Tensor, seen: Tensor, own: list[OWN], own_seen: Tensor | None) -> Tensor:
    """One softmax over all keys of a row and all of one's own. query [M, S, N, C]; seen [M, S, T]; own_seen [M, S, J]."""
    key, value = (x[row].repeat_interleave(N // G, dim=2) for x in shared)
    scores = torch.einsum("msnc,mtnc->mnst", query, key) / math.sqrt(C)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if own:
        own_key, own_value = (torch.cat(x, dim=1).repeat_interleave(N // G, dim=2) for x in zip(*own, strict=True))
        own_scores = torch.einsum("msnc,mjnc->mnsj", query, own_key) / math.sqrt(C)
        if own_seen is not None:
            own_scores = own_scores.masked_fill(~own_seen[:, None], -torch.inf)
        scores, value = torch.cat((scores, own_scores), dim=-1), torch.cat((value, own_value), dim=1)
    return torch.einsum("mnst,mtnc->msnc", scores.softmax(-1), value)


class Rows:
    """Two rows of documents, with padding, and places drawn of them."""

    def __init__(self, share: float) -> None:
        torch.manual_seed(0)
        self.documents = torch.randint(0, 4, (2, 300)).sort(1).values
        self.documents[1, 280:] = -1
        self.places = Places.where((torch.rand(2, 300) < share) & (self.documents >= 0))
        row, index = self.places
        same = self.documents[row] == self.documents[row, index][:, None]
        self.at, self.index = torch.arange(300), index[:, None]
        self.earlier, self.upto = same & (self.at < self.index), same & (self.at <= self.index)


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def compare(found: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    tolerance = {"rtol": 0.0, "atol": 1e-12 if found.dtype == torch.float64 else 5e-6}
    torch.testing.assert_close(found, expected, **tolerance)
    grad = torch.randn_like(found)
    for one, other in zip(torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("share", [0.02, 0.7, 1.0])
def test_slots_equal_dense(share: float, steps: int, dtype: torch.dtype) -> None:
    """Some or all places of packed documents as slots, with keys of that many later steps."""
    rows = Rows(share)
    M = len(rows.index)
    query, shared = leaf(M, 1, N, C, dtype=dtype), (leaf(2, 300, G, C, dtype=dtype), leaf(2, 300, G, C, dtype=dtype))
    own = [(leaf(M, 1, G, C, dtype=dtype), leaf(M, 1, G, C, dtype=dtype)) for _ in range(steps)]
    found = attend(query, shared, slot_stretches(rows.documents, rows.places), own=own)
    expected = dense(query, shared, rows.places.row_M, rows.upto[:, None], own, None)
    compare(found, expected, [query, *shared, *(x for pair in own for x in pair)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3, 20, 100])
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_blocks_equal_dense(share: float, window: int | None, causal: bool, dtype: torch.dtype) -> None:
    """Blocks of five queries, an anchor at a document's beginning among them, whose context is empty."""
    rows, S = Rows(share), 5
    chosen = torch.zeros(2, 300, dtype=torch.bool)
    chosen[rows.places] = chosen[1, 0] = True
    rows.places = Places.where(chosen)
    row, index = rows.places
    M = len(row)
    query, shared = leaf(M, S, N, C, dtype=dtype), (leaf(2, 300, G, C, dtype=dtype), leaf(2, 300, G, C, dtype=dtype))
    blocks = (leaf(M, S, G, C, dtype=dtype), leaf(M, S, G, C, dtype=dtype))
    context = block_context(rows.documents, rows.places, num_queries=S, window=window)
    inside = own_mask(S, causal=causal, window=window).to(query.device).expand(M, S, S)
    edges = (x.flatten(0, 1)[context.edge_ME] for x in shared)
    own = [tuple(torch.cat(parts, dim=1) for parts in zip(edges, blocks, strict=True))]
    found = attend(query, shared, context.stretches, own=own, mask_MSJ=torch.cat((context.mask_MSE, inside), dim=-1))  # type: ignore[arg-type]
    seen = (rows.documents[row] == rows.documents[row, index][:, None]) & (rows.at < index[:, None])
    seen = seen[:, None].expand(M, S, 300)
    if window is not None:
        seen = seen & (index[:, None, None] + torch.arange(S)[:, None] - rows.at < window)
    compare(found, dense(query, shared, row, seen, [blocks], inside), [query, *shared, *blocks])


@pytest.mark.parametrize("causal", [False, True])
def test_written_out_equals_the_kernel(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in where a device has no kernel, and shares keys among heads: values, log-sum-exp and gradients."""
    torch.manual_seed(0)
    query, key, value = torch.randn(9, N, C), torch.randn(9, G, C), torch.randn(9, G, C)
    grad = torch.randn(9, N, C)

    def both() -> list[Tensor]:
        out, lse = flash(query, key, value, causal=causal)
        return [out, lse, *flash_backward(grad, query, out, lse, key=key, value=value, causal=causal)]

    expected = both()
    monkeypatch.setattr(kernels, "_on_cpu", lambda _: False)
    for one, other in zip(both(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("queries", "causal"), [(9, True), (4, False)])
def test_on_a_gpu_as_far_as_shapes_go(queries: int, causal: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On imagined tensors of a CUDA or ROCm device: its operators take what they are given, and nothing depends on a value, for
    which the host would have to wait. (Autograd itself needs a device.)"""
    monkeypatch.setattr(kernels, "_can_be_merged", lambda *_: True)
    with FakeTensorMode(), torch.no_grad():
        query, key, value = (torch.empty(*shape, C, device="cuda", dtype=dtype) for shape in ((queries, N), (9, G), (9, G)))
        out, lse = flash(query, key, value, causal=causal)
        grads = flash_backward(torch.empty_like(out), query, out, lse, key=key, value=value, causal=causal)
    assert (out.shape, out.dtype, out.device.type) == (query.shape, dtype, "cuda")
    assert (lse.shape, lse.dtype) == ((queries, N), torch.float32)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, dtype) for x in (query, key, value)]


def test_memory_is_no_square() -> None:
    """Of 4096 slots in one document, scores of all by all would be 64 MB for each head; nothing that is kept or made is larger
    than what is read."""
    T = 4096
    documents, places = torch.zeros(1, T, dtype=torch.int64), Places(torch.zeros(T, dtype=torch.int64), torch.arange(T))
    query, key, value = (torch.randn(*shape, 2, 8, requires_grad=True) for shape in ((T, 1), (1, T), (1, T)))
    own = (torch.randn(T, 1, 2, 8), torch.randn(T, 1, 2, 8))
    with Sizes() as sizes:
        attend(query, (key, value), slot_stretches(documents, places), own=[own]).sum().backward()
    assert max(sizes.found) == T * 2 * 8


@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_numbers_of_a_head_that_are_not_side_by_side_are_refused(which: int) -> None:
    """torch's kernel on a CPU reads what is beside them instead, and says nothing."""
    given = [torch.randn(8, N, C), torch.randn(8, G, C), torch.randn(8, G, C)]
    given[which] = torch.randn(*given[which].shape[:2], 2 * C)[..., ::2]
    with pytest.raises(AssertionError, match="side by side"):
        flash(*given, causal=True)
