"""Mends what vLLM 0.32's CPU build gets wrong, where a test would otherwise measure that and not us."""

import torch
from torch import Tensor


def mend_sampling() -> None:
    """With a drafter, temperature, top-k and top-p of a request reach the sampler as uninitialised memory.

    vLLM's CPU kernel spreads them over the request's draft positions into an int64 copy of the output, which it then drops,
    unless the values were int64 already. Greedy requests never read them; sampled ones come out close to greedy.
    """
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(
        x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return replaced.repeat_interleave(counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
