"""torch's flash kernels with their log-sum-exp, which F.scaled_dot_product_attention keeps to itself.

Shapes: L queries, S keys, N query heads, G key-value heads (N a multiple of G), C head size; one sequence at a time.
"""

import math
import sys
from functools import cache

import torch
from torch import Tensor

aten = torch.ops.aten


def flash(query_LNC: Tensor, key_SGC: Tensor, value_SGC: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """softmax(q k / sqrt(C)) v, [L, N, C] in the query's dtype, and the scores' log-sum-exp [L, N], at least fp32.

    causal: query i sees keys up to i; as many keys as queries then.
    """
    # Elsewhere a CPU's kernel would read what is beside them, without a word.
    assert all(x.stride(-1) == 1 for x in (query_LNC, key_SGC, value_SGC)), "the kernels want each head's numbers side by side"
    query, key, value = (_heads_first(x) for x in (query_LNC, key_SGC, value_SGC))
    if _on_cpu(query):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    elif _has_kernel(query):
        key, value = _for_each_query_head(query, key, value)
        out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    else:
        out, lse = _written_out(query, *_for_each_query_head(query, key, value), causal=causal)
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)


def flash_backward(
    grad_LNC: Tensor, query_LNC: Tensor, out_LNC: Tensor, lse_LN: Tensor, *, key: Tensor, value: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query [L, N, C], key and value [S, G, C] through these keys' share of an attention whose output is out
    and whose log-sum-exp is lse: flash()'s own, or, exactly as well, of a softmax over these and other keys."""
    grad, query, key, value, out = (_heads_first(x) for x in (grad_LNC, query_LNC, key, value, out_LNC))
    lse = lse_LN.transpose(0, 1).unsqueeze(0).contiguous()
    G = key.shape[1]
    if _on_cpu(query):
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = backward(grad, query, key, value, out, lse, 0.0, causal)
    elif _has_kernel(query):
        key, value = _for_each_query_head(query, key, value)
        found = _kernel_backward(grad, query, key, value, out, lse, causal=causal)
    else:
        key, value = _for_each_query_head(query, key, value)
        found = _written_out_backward(grad, query, key, value, out, lse, causal=causal)
    dquery, dkey, dvalue = found
    if dkey.shape[1] != G:
        dkey, dvalue = (x.unflatten(1, (G, -1)).sum(2) for x in (dkey, dvalue))
    return tuple(x.squeeze(0).transpose(0, 1) for x in (dquery, dkey, dvalue))


def _heads_first(x_LNC: Tensor) -> Tensor:
    return x_LNC.transpose(0, 1).unsqueeze(0)


def _on_cpu(query: Tensor) -> bool:
    return query.device.type == "cpu"


def _has_kernel(query: Tensor) -> bool:
    """Whether this GPU, CUDA's or ROCm's, has a flash kernel for such queries, and one that can be merged."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    fits = query.device.type == "cuda" and half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return fits and _can_be_merged(query.device, query.dtype, query.shape[-1])


@cache
def _can_be_merged(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Tried once: old GPUs have no kernel, and some builds gave log-sum-exps to the base of 2, which would spoil training."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(1, 2, 64, head_size, generator=generator).to(device, dtype) for _ in range(4))
    query, key, value, grad = drawn
    try:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
        # As if as much weight again lay on other keys.
        found = _kernel_backward(grad, query, key, value, out, lse + math.log(2.0), causal=True)
    except RuntimeError as error:
        print(f"no flash attention for {dtype} on {device}, all scores are written out: {error}", file=sys.stderr)
        return False
    plain_out, plain_lse = _written_out(query, key, value, causal=True)
    plain = _written_out_backward(grad, query, key, value, plain_out, plain_lse + math.log(2.0), causal=True)
    near = all(
        torch.allclose(one.float(), other.float(), rtol=0.05, atol=0.05)
        for one, other in zip((out, lse, *found), (plain_out, plain_lse, *plain), strict=True)
    )
    if not near:
        print(f"flash attention for {dtype} on {device} is not what it should be; all scores are written out", file=sys.stderr)
    return near


def _kernel_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # Without dropout no random state is read.
    unused = torch.empty(2, dtype=torch.uint64, device=query.device)
    sizes = (None, None, query.shape[2], key.shape[2])
    backward = aten._scaled_dot_product_flash_attention_backward
    found: tuple[Tensor, Tensor, Tensor] = backward(grad, query, key, value, out, lse, *sizes, 0.0, causal, unused, unused)
    return found


def _for_each_query_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for each query head: not every build of the GPU kernels shares them among heads."""
    heads_per_group = query.shape[1] // key.shape[1]
    return key.repeat_interleave(heads_per_group, dim=1), value.repeat_interleave(heads_per_group, dim=1)


def _scores(query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
    scores = (query.float() @ key.float().mT) / math.sqrt(query.shape[-1])
    if causal:
        later_LS = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later_LS, -torch.inf)
    return scores


def _written_out(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Where there is no kernel: any device and dtype, with all scores of a stretch in memory."""
    scores = _scores(query, key, causal=causal)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ value.float()).to(query.dtype), lse


def _written_out_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_scores(query, key, causal=causal) - lse.unsqueeze(-1)).exp()
    grad32 = grad.float()
    delta = (grad32 * out.float()).sum(-1, keepdim=True)
    dscores = weights * (grad32 @ value.float().mT - delta) / math.sqrt(query.shape[-1])
    dtype = query.dtype
    return (dscores @ key.float()).to(dtype), (dscores.mT @ query.float()).to(dtype), (weights.mT @ grad32).to(dtype)
