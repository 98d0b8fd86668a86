"""A frozen target too large for one device: every process holds a part of each decoder layer; all gather it for its forward.

FSDP2 does it, whatever engine trains the drafter. Embedding, last norm and head stay whole on each process, for drafters read them.
One process reads the checkpoint into its host's memory; the others are sent their parts, layer by layer.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def load_sharded(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The target in ``folder``, frozen, its decoder layers spread over all processes, each of which has to call this.

    A layer's forward waits for all processes: they have to run the target equally often.
    """
    config = AutoConfig.from_pretrained(folder)
    if dist.get_rank() == 0:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.requires_grad_(False).eval()
    _same_everywhere(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.get_decoder().layers:
        whole = layer.state_dict()
        buffers = {name: buffer for name, buffer in layer.named_buffers() if name not in whole}
        layer.to("meta")
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)  # each layer is a root, which would stay gathered
        layer.to_empty(device=device)
        set_model_state_dict(layer, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        for name, buffer in buffers.items():
            layer.get_buffer(name).copy_(_from_first(buffer, device))
    layers = {id(part) for layer in model.get_decoder().layers for part in layer.modules()}
    for module in model.modules():
        if id(module) not in layers:
            for name, tensor in _own_tensors(module):
                sent = _from_first(tensor, device)
                setattr(module, name, nn.Parameter(sent, requires_grad=False) if isinstance(tensor, nn.Parameter) else sent)
    model.tie_weights()
    return model


def _same_everywhere(model: PreTrainedModel) -> None:
    """Gives every tensor the dtype it has at the first process, which read some as the architecture wants them kept."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sent = [{name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}]
    dist.broadcast_object_list(sent, src=0)
    for name, tensor in tensors.items():
        assert name in sent[0], f"{name} is not in the model that was read"
        shape, dtype = sent[0][name]
        assert tuple(tensor.shape) == shape, f"{name} has another shape in the model that was read: {shape}"
        tensor.data = tensor.data.to(dtype)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from list(module.named_parameters(recurse=False))
    yield from list(module.named_buffers(recurse=False))


def _from_first(tensor: Tensor, device: torch.device) -> Tensor:
    """The first process's values, on ``device``, at every process."""
    sent = tensor.detach().to(device) if dist.get_rank() == 0 else torch.empty_like(tensor, device=device)
    dist.broadcast(sent, src=0)
    return sent
