"""Why a run may end before its last step: a signal, the time it was given, a gradient that is no number.

A run that was told to leave saves first, leaves a file "left-early" in its folder, and ends with status 75 (EX_TEMPFAIL): the same
command goes on where it stopped. So a scheduler's script, for one process and for several, whose launcher makes every status 1:

    python train/eagle3.py recipe.yaml; [ $? = 75 ] && scontrol requeue $SLURM_JOB_ID

    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280    # seconds that the launcher waits behind SIGTERM; 30 if not said
    accelerate launch train/eagle3.py recipe.yaml; [ -e runs/<name>-eagle3/left-early ] && scontrol requeue $SLURM_JOB_ID

SIGTERM goes through the launcher of several processes; SIGUSR1 ends it, and so has to go to the training processes alone.
"""

import json
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Self

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor

from data.batch import Document
from recipes.load import RecipeError

if TYPE_CHECKING:
    from train.loop import Run

LEFT_EARLY = 75
"""Exit status of a run that was told to leave."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they kill: Slurm the first, or what its --signal says."""


class StopRequest:
    """Notes that this process was told to leave; the training loop asks in every step, and leaves behind it. max_hours: of this
    launch."""

    def __init__(self, run: "Run", max_hours: float | None) -> None:
        self.run, self.reason = run, ""
        self.deadline = psutil.Process().create_time() + 3600 * max_hours if max_hours is not None else float("inf")
        self.marker = run.folder / "left-early"

    def __enter__(self) -> Self:
        if self.run.accelerator.is_main_process:
            self.marker.unlink(missing_ok=True)
        self.before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.reason = signal.Signals(number).name

    def told(self) -> Tensor:
        """How many processes were told to leave, a scalar on the device; all have to ask."""
        if time.time() > self.deadline:
            self.reason = self.reason or "train.max_hours"
        told = torch.full((), float(bool(self.reason)), device=self.run.accelerator.device)
        found: Tensor = self.run.accelerator.reduce(told, reduction="sum")
        return found

    def leave(self, step: int, total_steps: int) -> NoReturn:
        """Ends this process, which has saved."""
        if self.run.accelerator.is_main_process:
            reason = self.reason or "another process was told to leave"
            self.marker.write_text(reason + "\n")
            print(f"{reason}: left at step {step} of {total_steps}; the same command goes on there")
        self.run.accelerator.wait_for_everyone()
        sys.exit(LEFT_EARLY)


def stop_nonfinite(run: "Run", step: int, documents: list[list[Document]], seeds: Sequence[int]) -> NoReturn:
    """Ends a run whose gradient is no number, before that reaches the weights. Saves what shows it again: the weights, and each
    process's packed rows with their features, in micro-batches as they ran."""
    accelerator, size = run.accelerator, run.config.rows_per_device
    folder = run.folder / f"nonfinite-{step:06d}"
    folder.mkdir(exist_ok=True)
    weights = accelerator.get_state_dict(run.model)
    if accelerator.is_main_process:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "drafter.safetensors")
    rows = [{"seed": seed, "documents": [document.id for document in row]} for seed, row in zip(seeds, documents, strict=True)]
    (folder / f"rows-{accelerator.process_index}.json").write_text(json.dumps(rows, indent=1))
    finite = True
    for i in range(0, len(documents), size):
        batch = run.teacher.batch(documents[i : i + size], list(seeds[i : i + size]))
        finite &= bool(batch.aux_hidden_BTAD.isfinite().all() and batch.last_hidden_BTD.isfinite().all())
        parts = {**vars(batch.text), **batch._asdict()}
        tensors = {name: part.cpu().contiguous() for name, part in parts.items() if name != "text"}
        save_file(tensors, folder / f"batch-{accelerator.process_index}-{i // size}.safetensors")
    accelerator.wait_for_everyone()
    fix = "lower the learning rate" if finite else "the target's own states are no numbers: see its checkpoint, and target.dtype"
    raise RecipeError(
        f"the gradient is no number at step {step}, and was not used; weights, rows and their batches are in {folder}; "
        f"{fix}; then run again under another train.tag"
    )
