"""How much floating-point work this machine could do: for the MFU in the log (arXiv 2204.02311), and for plans.

What training does is counted where it is done (drafters/drafter.py: Work; data/teacher.py), two FLOPs per weight and row forward,
four backward; of the target's experts, those that a token goes through. (torch's FLOP counter would be exact, but under it a step
rounds otherwise: a resumed run would be another one.)
"""

import time

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product here, the best of some: what the processor really gives, not what its sheet says."""
    size = 1024 if device.type == "cpu" else 8192
    one = torch.ones(size, size, device=device, dtype=dtype)  # no random numbers: their state belongs to the run
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        # Reading a value waits for the device, whichever it is.
        float((one @ one)[0, 0])
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def training_dtype(accelerator: Accelerator) -> torch.dtype:
    """What matrix products of the drafter are computed in."""
    mixed = accelerator.mixed_precision == "bf16"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        mixed = mixed or bool(config.get("torch_autocast", {}).get("enabled"))
    return torch.bfloat16 if mixed else torch.float32
