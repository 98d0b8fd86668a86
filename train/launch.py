"""How a process takes part in a launch: its accelerator, and the state it goes on from."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    LoggerType,
    ProjectConfiguration,
    set_seed,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.cpp_extension import get_default_build_root
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from recipes.cpu import keep_freed_memory
from recipes.load import RecipeError
from train import run_folder

if TYPE_CHECKING:
    from train.loop import TrainConfig


def make_accelerator(train: "TrainConfig", folder: Path) -> Accelerator:
    """The accelerator of this process; RecipeError where a launch would silently train something else than was asked for."""
    _check_trackers(train.trackers)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and os.environ.get("LOCAL_RANK", "0") == "0":
        drop_stale_locks()
    has_device = torch.cuda.is_available() or torch.backends.mps.is_available()
    accelerator = Accelerator(
        cpu=not has_device,
        log_with=list(train.trackers) or None,
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder)),
        # The drafter's buffers are constants: nothing to broadcast.
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False),
            # While one process reads a large target, or makes the documents, the others wait.
            InitProcessGroupKwargs(timeout=timedelta(hours=1)),
        ],
    )
    if accelerator.distributed_type == DistributedType.FSDP and accelerator.mixed_precision == "bf16":
        # accelerate's own policy would also add up gradients, and hand back the loss, in bf16.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # Else transformers would shard the frozen target, too, which each device keeps whole.
        unset_hf_deepspeed_config()
    if accelerator.mixed_precision == "fp16":
        raise RecipeError("mixed_precision is fp16, whose gradients overflow by design; give bf16, or no")
    asked = max(int(os.environ.get("WORLD_SIZE", "1")), _processes_asked_for())
    if accelerator.num_processes != asked:
        raise RecipeError(
            f"{asked} processes were asked for, but this one trains alone; on CPUs launch with "
            f"accelerate launch --config_file recipes/accelerate/cpu.yaml --num_processes {asked}"
        )
    if train.rows_per_step % asked:
        raise RecipeError(f"train.rows_per_step is {train.rows_per_step}; give a multiple of the {asked} processes")
    if not has_device:
        keep_freed_memory()
        torch.set_num_threads(train.cpu_threads or max(1, (os.cpu_count() or 1) // accelerator.num_processes))
    set_seed(train.seed)
    return accelerator


def drop_stale_locks() -> None:
    """Removes the lock that a killed build of one of DeepSpeed's extensions left, for which every later launch would wait forever.

    A builder holds its lock open. One that no process here does may be another machine's, which shares this home, or another
    container's: unless it is older than any build.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    locks = [path.resolve() for path in (*root.glob("*/lock"), *root.glob("*/*/lock"))]
    if not locks:
        return
    held = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            held |= {Path(file.path) for file in process.open_files()}
    for lock in locks:
        with suppress(FileNotFoundError):
            if lock in held:
                continue
            if time.time() - lock.stat().st_mtime > 600:
                lock.unlink()
            else:
                print(f"DeepSpeed waits for {lock}; if no build is running anywhere, delete that file", file=sys.stderr, flush=True)


def _check_trackers(wanted: tuple[str, ...]) -> None:
    """accelerate would pass over one that is not installed without a word."""
    known, here = LoggerType.list(), [str(tracker) for tracker in get_available_trackers()]
    for name in wanted:
        if name not in known:
            raise RecipeError(f"train.trackers has {name}; give any of {', '.join(sorted(set(known) - {'all'}))}")
        if name != "all" and name not in here:
            raise RecipeError(f"train.trackers has {name}, which is not installed; pip install {name.replace('_', '-')}")


def _processes_asked_for() -> int:
    """--num_processes of the accelerate launcher above this process, which on a CPU starts one process all the same."""
    try:
        words = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return 1
    if not any("accelerate" in word for word in words[:3]):
        return 1
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name in ("--num_processes", "--num-processes"):
            return int(value or following)
    return 1


def state_to_load(accelerator: Accelerator, folder: Path) -> Path | None:
    """The engine's state in a run's newest checkpoint, None where there is none; to be asked for before the engine starts.

    DeepSpeed's is in as many slices as there were processes. For another number it is made a universal checkpoint at first.
    """
    saved = run_folder.steps_saved(folder)
    if not saved:
        return None
    checkpoint = run_folder.checkpoint_folder(folder, saved[-1])
    state = checkpoint / "state"
    slices = len(list((state / "pytorch_model").glob("*zero_pp_rank_*_optim_states.pt")))
    if accelerator.distributed_type != DistributedType.DEEPSPEED or slices in (0, accelerator.num_processes):
        return state
    universal = checkpoint / "state-universal"
    if accelerator.is_main_process and not universal.is_dir():
        _make_universal(state, universal)
    accelerator.wait_for_everyone()
    accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {"load_universal": True}
    return universal


def _make_universal(state: Path, universal: Path) -> None:
    aside = universal.with_name(f".{universal.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for file in state.iterdir():  # the schedule, random states
        if file.is_file():
            shutil.copy(file, aside)
    words = ("--input_folder", str(state / "pytorch_model"), "--output_folder", str(aside / "pytorch_model"))
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words, "--inject_missing_state"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split())[-300:]
        raise RecipeError(f"{state} is of another number of processes, and DeepSpeed can't convert it; launch as many: {said}")
    (aside / "latest_universal").write_text("pytorch_model")
    aside.rename(universal)
