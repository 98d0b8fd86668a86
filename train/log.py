"""What a run says while it goes: a progress bar with rate and ETA, metrics.jsonl, and accelerate's trackers."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from data.batch import StepOutput
from recipes.load import RecipeError
from recipes.progress import progress_bar
from recipes.provenance import peak_memory
from train import run_folder
from train.work import matmul_peak, training_dtype

if TYPE_CHECKING:
    from train.loop import Progress, Run, Validation


class Log:
    """Collects sums on the device and reads them only every log_every steps, so that no step waits for the host."""

    def __init__(self, run: "Run", total_steps: int, first_step: int) -> None:
        self.run, self.total_steps = run, total_steps
        main = run.accelerator.is_main_process
        self.bar = progress_bar(total=total_steps, initial=first_step, disable=not main, unit="step", desc="training")
        self.postfix: dict[str, str] = {}
        # FLOP/s of one process at its peak, in the drafter's training and in the target's forward.
        dtypes = (training_dtype(run.accelerator), run.teacher.head.weight_VD.dtype)
        self.peaks = [matmul_peak(run.accelerator.device, dtype) for dtype in dtypes]
        self._reset()

    def _reset(self) -> None:
        self.sums: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.counts: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.num_tokens = 0
        self.read: list[tuple[float | torch.Event, float | torch.Event]] = []
        self.work, self.targets_work = 0.0, self.run.teacher.work
        self.since = time.monotonic()

    def step(self, progress: "Progress", outputs: list[StepOutput], grad_norm: float, *, num_tokens: int) -> None:
        """Takes in one optimiser step of this rank."""
        for output in outputs:
            pairs = {"loss": (output.loss_sum.detach(), output.weight), **output.metrics}
            for name, (total, count) in pairs.items():
                self.sums[name].append(total)
                self.counts[name].append(count)
            self.work += output.work
        self.num_tokens += num_tokens
        self.bar.update()
        if progress.step % self.run.config.log_every == 0 or progress.step == self.total_steps:
            self._write(progress, grad_norm)

    def _write(self, progress: "Progress", grad_norm: float) -> None:
        names = sorted(self.sums)
        device = self.run.accelerator.device
        flat = [torch.stack(self.sums[name]).sum() for name in names] + [torch.stack(self.counts[name]).sum() for name in names]
        # Seconds that all this takes a process at its peak.
        ideal = self.work / self.peaks[0] + (self.run.teacher.work - self.targets_work) / self.peaks[1]
        for number in (self.num_tokens, ideal / self.run.accelerator.num_processes):
            flat.append(torch.full((), float(number), device=device))
        values = self.run.accelerator.reduce(torch.stack(flat), reduction="sum").tolist()
        sums, counts, (num_tokens, ideal) = values[: len(names)], values[len(names) : -2], values[-2:]
        means = {name: total / max(count, 1e-6) for name, total, count in zip(names, sums, counts, strict=True)}
        seconds = time.monotonic() - self.since
        rate = num_tokens / seconds
        if not means["loss"] < float("inf"):
            raise RecipeError(
                f"the loss is {means['loss']} at step {progress.step}; lower the learning rate, then run again under another name"
            )
        row = {
            "step": progress.step,
            "epoch": progress.epoch,
            "lr": self.run.scheduler.get_last_lr()[0],
            "grad_norm": grad_norm,
            "tokens_per_s": rate,
            "features_share": sum(seconds_between(*marks) for marks in self.read) / seconds,
            "peak_memory_gib": peak_memory(device) / 2**30,
            "mfu": ideal / seconds,
            **means,
        }
        self.postfix |= {"loss": f"{means['loss']:.3f}", "tokens/s": f"{rate:.0f}"}
        self._emit(row)
        self._reset()

    def validation(self, progress: "Progress", measured: "Validation") -> None:
        """Takes in a validation."""
        found = measured.acceptance
        self.postfix["acceptance length"] = f"{found.length:.3f}"
        row = {"acceptance_length": found.length, "expected_length": measured.expected_length}
        row |= {f"accepted_{i}": share for i, share in enumerate(found.per_position)}
        self._emit({"step": progress.step} | {f"validation/{name}": value for name, value in row.items()})

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Time spent in here, the device's where that is a GPU, counts as waiting for features: for the target, or for a store."""
        start = self._mark()
        yield
        self.read.append((start, self._mark()))

    def _mark(self) -> float | torch.Event:
        device = self.run.accelerator.device
        if device.type != "cuda":
            return time.monotonic()
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent in here, and what the target reads in it, do not count in the rates of training."""
        if self.run.accelerator.device.type == "cuda":
            torch.accelerator.synchronize()  # what it was told to do before
        start, targets_work = time.monotonic(), self.run.teacher.work
        yield
        self.since += time.monotonic() - start
        self.targets_work += self.run.teacher.work - targets_work

    def _emit(self, row: dict[str, Any]) -> None:
        if self.run.accelerator.is_main_process:
            run_folder.append_metrics(self.run.folder, row)
            self.bar.set_postfix(self.postfix, refresh=False)
        self.run.accelerator.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    def close(self) -> None:
        """Ends the bar."""
        self.bar.close()


def seconds_between(start: float | torch.Event, stop: float | torch.Event) -> float:
    """Of two marks; a GPU has passed both."""
    if isinstance(start, float) or isinstance(stop, float):
        return float(stop) - float(start)  # type: ignore[arg-type]
    milliseconds: float = start.elapsed_time(stop)
    return milliseconds / 1000
