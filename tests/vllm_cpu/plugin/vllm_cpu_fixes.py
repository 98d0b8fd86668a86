"""Mends what vLLM 0.32's CPU build gets wrong, where a measurement would otherwise be of that and not of the drafter.

A plugin of the group vllm.general_plugins: vLLM calls register() in each of its processes.
"""

import os
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def register() -> None:
    mend_sampling()
    mend_context_keys()
    mend_hidden_states()


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


def mend_context_keys() -> None:
    """The context keys of every layer of a DFlash or DSpark drafter are normed with the first layer's weights.

    vLLM norms all layers' in one call, with a weight per layer, of which the CPU kernel reads only the first. The drafts are
    then others than on a GPU; the answers are not.
    """
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize_context_k(self: DFlashQwen3Model, keys_LTGC: Tensor) -> Tensor:
        x = keys_LTGC.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._rms_norm_eps)
        return (x * self._k_norm_weights[:, None, None].float()).to(keys_LTGC.dtype).contiguous()

    DFlashQwen3Model._normalize_context_k = normalize_context_k


def mend_hidden_states() -> None:
    """extract_hidden_states hands its states over through pinned memory, a stream and an event, none of which a CPU has: here they
    are written at once."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock

    def write(self: Any, pending: Any) -> None:
        slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = stock.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        save_file({"hidden_states": states, "token_ids": pending.token_ids.clone()}, pending.filename)
        os.close(self._lock_fds.pop(pending.req_id))
        self._req_copy_events[pending.req_id] = SimpleNamespace(query=lambda: True)

    stock.ExampleHiddenStatesConnector._submit_async_write = write
    # The CPU's attention has one layout only, which the states are read from as well.
    stock.ExampleHiddenStatesConnector.get_required_kvcache_layout = classmethod(lambda cls, config: None)
