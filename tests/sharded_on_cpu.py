"""Runs a training script sharded by FSDP2 or DeepSpeed over gloo, which accelerate would refuse or silently not do on a CPU.

accelerate launch --config_file <config> tests/sharded_on_cpu.py train/eagle3.py recipe.yaml
"""

import os
import runpy
import sys
from datetime import timedelta
from typing import Any

import accelerate
from accelerate.state import PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs

if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    prepare_backend = PartialState._prepare_backend

    def gloo(self: PartialState, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        prepare_backend(self, *args, **kwargs)
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = gloo


class OverGloo(accelerate.Accelerator):
    def __init__(self, **settings: Any) -> None:
        others = [handler for handler in settings["kwargs_handlers"] if not isinstance(handler, InitProcessGroupKwargs)]
        handlers = [*others, InitProcessGroupKwargs(backend="gloo", timeout=timedelta(minutes=5))]
        super().__init__(**{**settings, "cpu": False, "kwargs_handlers": handlers})


accelerate.Accelerator = OverGloo

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
