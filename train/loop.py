"""The training loop every drafter shares.

One optimiser step: this rank's rows of the step, in micro-batches; weights of all losses counted first and summed over ranks;
each micro-batch's backward scaled by that total; clip, step. So the update does not depend on how rows are dealt to devices
and micro-batches. The order of the data is a function of (seed, epoch), so a resumed run goes on where it stopped.
"""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from data.batch import Batch, Document, HostCopy, StepOutput
from data.packing import RowStream, lengths_of, pack
from data.teacher import Teacher
from drafters.acceptance import Acceptance, acceptance
from drafters.drafter import Drafter
from drafters.layers import MLP
from recipes.files import explain_full_disk
from recipes.load import RecipeError
from train import run_folder
from train.launch import state_to_load
from train.log import Log
from train.stop import StopRequest, stop_nonfinite


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay to final_lr_share of lr."""

    lr: float = 1e-4
    betas: tuple[float, ...] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_share: float = 0.04
    final_lr_share: float = 0.02
    max_grad_norm: float = 1.0
    epochs: int = 10

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise RecipeError(f"optim.betas is {list(self.betas)}; give two")


@dataclass(frozen=True)
class TrainConfig:
    """How a run goes, whatever its method.

    row_tokens: length of a packed row. rows_per_step: rows of one optimiser step, over all devices. rows_per_device: rows of
    one forward. feature_cache_gib: memory per process for target features kept across epochs. features: a store of them that
    data/capture.py made, in the target's place. validations: how often the acceptance length is measured (and a checkpoint
    kept), spread evenly over the run. patience: of these without a longer acceptance length, after which the run ends; null: it
    goes to its end. max_steps: where optim.epochs would be more; the learning rate falls to its end there. max_hours: of one
    launch, which then saves and leaves with status 75, as it does when it gets SIGTERM or SIGUSR1 (train/stop.py); the next
    launch goes on. tag: a word that tells this run from others of the same recipe: runs/<name>-<method>-<tag>. trackers: any of
    accelerate's, for example wandb (WANDB_MODE=offline works). gradient_checkpointing: the drafter's MLPs are computed again in
    the backward, for less memory. cpu_threads: of a process without a GPU; null divides the cores among the processes, where
    accelerate's launcher would leave each a single one.
    """

    row_tokens: int = 4096
    rows_per_step: int = 32
    rows_per_device: int = 1
    feature_cache_gib: float = 0.0
    features: Path | None = None
    validations: int = 20
    patience: int | None = None
    max_steps: int | None = None
    max_hours: float | None = None
    log_every: int = 10
    keep_checkpoints: int = 2
    trackers: tuple[str, ...] = ()
    tag: str | None = None
    gradient_checkpointing: bool = False
    cpu_threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("row_tokens", "rows_per_step", "rows_per_device", "validations", "log_every", "keep_checkpoints")
        for name in (*counts, "patience", "max_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RecipeError(f"train.{name} is {value}; give 1 or more")
        if self.max_hours is not None and self.max_hours <= 0:
            raise RecipeError(f"train.max_hours is {self.max_hours}; give more than 0, or null for no limit")


@dataclass
class Progress:
    """Where a run stands: optimiser steps done, the next row of the data (epoch, offset), the longest acceptance length validated,
    and the validations since. Saved with each checkpoint."""

    step: int = 0
    epoch: int = 0
    offset: int = 0
    best_length: float = 0.0
    since_best: int = 0

    def validated(self, length: float) -> None:
        """Takes in a validation."""
        self.since_best = 0 if length > self.best_length else self.since_best + 1
        self.best_length = max(length, self.best_length)

    def has_ended(self, total_steps: int, patience: int | None) -> bool:
        """Whether nothing is left to train."""
        return self.step >= total_steps or (patience is not None and self.since_best >= patience)


@dataclass(frozen=True)
class Run:
    """The parts of one training run, as the helpers below share them."""

    accelerator: Accelerator
    teacher: Teacher
    folder: Path
    config: TrainConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR


def fit(
    accelerator: Accelerator,
    drafter: Drafter,
    teacher: Teacher,
    *,
    folder: Path,
    train_docs: Sequence[Document],
    validation_docs: Sequence[Document],
    optim: OptimConfig,
    train: TrainConfig,
) -> None:
    """Trains ``drafter`` to the end, from the newest checkpoint in ``folder`` if there is one."""
    stream = RowStream(lengths_of(train_docs), row_tokens=train.row_tokens, seed=train.seed)
    total_steps = max(1, round(optim.epochs * len(stream.rows) / train.rows_per_step))
    total_steps = min(total_steps, train.max_steps or total_steps)
    validate_at = {math.ceil(total_steps * (i + 1) / train.validations) for i in range(train.validations)} | {total_steps}
    for module in drafter.modules():
        if isinstance(module, MLP):
            module.recompute = train.gradient_checkpointing
    state = state_to_load(accelerator, folder)
    run = Run(accelerator, teacher, folder, train, *engage(accelerator, drafter, optim, total_steps))
    progress = restore(run, state)
    stream.seek(epoch=progress.epoch, offset=progress.offset)
    if progress.step:
        accelerator.print(f"{folder} goes on behind step {progress.step} of {total_steps}")
    if progress.has_ended(total_steps, train.patience):
        accelerator.print(f"{folder} was trained to its end, step {progress.step}: nothing to do")
        return
    if train.feature_cache_gib > 0 and train.features is None:
        budget_bytes = int(train.feature_cache_gib * 2**30)
        teacher.keep([*train_docs, *validation_docs], budget_bytes=budget_bytes, show=accelerator.is_main_process)

    with closing(Log(run, total_steps, progress.step)) as log, StopRequest(run, train.max_hours) as stop:
        data = read_ahead(run, stream, train_docs, log)
        coming = next(data)
        while not progress.has_ended(total_steps, train.patience):
            taken, batches = coming
            outputs, norm = gradients(run, batches, max_grad_norm=optim.max_grad_norm)
            waited_for = HostCopy(torch.stack((norm, stop.told())))
            if progress.step + 1 < total_steps:
                coming = next(data)  # what the device does while the host waits
            grad_norm, told = waited_for.read()
            if not math.isfinite(grad_norm):
                stop_nonfinite(run, progress.step + 1, taken.documents, taken.seeds)
            update(run)
            progress = replace(progress, step=progress.step + 1, epoch=taken.epoch, offset=taken.offset)
            log.step(progress, outputs, grad_norm, num_tokens=taken.num_tokens())
            if progress.step in validate_at:
                with log.paused():
                    measured = validate(run, validation_docs)
                    progress.validated(measured.acceptance.length)
                    log.validation(progress, measured)
                    save(run, progress, measured.acceptance.length)
            if told and not progress.has_ended(total_steps, train.patience):
                if progress.step not in validate_at:
                    save(run, progress, None)
                stop.leave(progress.step, total_steps)
        if progress.step < total_steps:
            accelerator.print(
                f"train.patience: no longer acceptance length in {progress.since_best} validations; ended at step {progress.step}"
            )


def engage(
    accelerator: Accelerator, drafter: Drafter, optim: OptimConfig, total_steps: int
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Model, optimiser and schedule, as the engine of this launch wraps them."""
    # Fused: the plain one makes a copy or two of all weights in every step.
    betas = (optim.betas[0], optim.betas[1])
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=optim.lr, betas=betas, weight_decay=optim.weight_decay, fused=True)
    # The scheduler is not prepared: accelerate would step it once per process.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, total_steps, optim))
    accelerator.register_for_checkpointing(scheduler)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:  # the one engine that clips by itself
        accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"] = optim.max_grad_norm
    model, optimizer = accelerator.prepare(drafter, optimizer)
    if isinstance(model, FSDPModule):
        # What validation calls must gather the sharded weights as forward() does.
        for name in ("propose", "expected_length"):
            register_fsdp_forward_method(model, name)  # type: ignore[arg-type]  # FSDPModule is mixed into modules only
    return model, optimizer, scheduler


class Taken(NamedTuple):
    """What this rank trains on in one step: its packed rows and their seeds; and where the data goes on behind the step."""

    documents: list[list[Document]]
    seeds: list[int]
    epoch: int
    offset: int

    def num_tokens(self) -> int:
        return sum(len(document.tokens_T) for row in self.documents for document in row)


def take(run: Run, stream: RowStream, docs: Sequence[Document]) -> Taken:
    """Takes a step's rows, before their features are asked for, so that a store can read them meanwhile."""
    accelerator = run.accelerator
    rows = stream.take(run.config.rows_per_step)[accelerator.process_index :: accelerator.num_processes]
    documents = [[docs[i] for i in row.documents] for row in rows]
    run.teacher.expect(document for row in documents for document in row)
    return Taken(documents, [row.seed for row in rows], stream.epoch, stream.offset)


def read_ahead(run: Run, stream: RowStream, docs: Sequence[Document], log: Log) -> Iterator[tuple[Taken, list[Batch]]]:
    """What this rank trains on in one step after the other, with its features, in micro-batches."""
    size = run.config.rows_per_device
    coming = take(run, stream, docs)
    while True:
        taken, coming = coming, take(run, stream, docs)
        starts = range(0, len(taken.documents), size)
        with log.reading():
            batches = [run.teacher.batch(taken.documents[i : i + size], taken.seeds[i : i + size]) for i in starts]
        yield taken, batches


def gradients(run: Run, batches: list[Batch], *, max_grad_norm: float) -> tuple[list[StepOutput], Tensor]:
    """The gradient of one step, clipped, from this rank's micro-batches, of which it leaves none; their outputs, and its norm
    before clipping, a scalar on the device.

    The loss is sum / weight over all rows of all ranks: weigh first, then scale each backward. Nothing here waits for the device
    (but DeepSpeed's own step, and the sizes of a rope_type that depend on how long a text is).
    """
    drafter = run.accelerator.unwrap_model(run.model)
    weight = torch.stack([drafter.loss_weight(batch) for batch in batches]).sum()
    for batch in batches:
        # Nothing, but no number where one of the target's states is none, which may leave no label, and so no loss to show it: then
        # every process's gradients are none.
        weight = weight + 0.0 * sum(x.sum(dtype=torch.float32) for x in (batch.aux_hidden_BTAD, batch.last_hidden_BTD))
    total = run.accelerator.reduce(weight, reduction="sum").clamp_min(1e-6)
    outputs = []
    while batches:
        batch = batches.pop(0)
        last = not batches
        # DeepSpeed's backward also steps, unless told that gradients are still gathering.
        run.accelerator.gradient_state._set_sync_gradients(last)
        with nullcontext() if last else run.accelerator.no_sync(run.model):
            output = run.model(batch)
            # The engines average gradients over processes; the loss is a global sum.
            run.accelerator.backward(output.loss_sum * run.accelerator.num_processes / total)
        outputs.append(output)
    norm = run.accelerator.clip_grad_norm_(run.model.parameters(), max_grad_norm)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return outputs, torch.as_tensor(norm, dtype=torch.float32, device=run.accelerator.device)


def update(run: Run) -> None:
    """Takes the step that the gradients say."""
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()


def lr_share(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Share of the peak learning rate at an optimiser step, counted from 0: linear warm-up, then cosine decay."""
    warmup = max(1, round(optim.warmup_share * total_steps))
    if step < warmup:
        return (step + 1) / warmup
    turn = (step - warmup) / max(1, total_steps - warmup)
    return optim.final_lr_share + (1 - optim.final_lr_share) * 0.5 * (1 + math.cos(math.pi * turn))


class Validation(NamedTuple):
    """acceptance: of the drafter's own greedy drafts. expected_length: the acceptance length to expect under sampling."""

    acceptance: Acceptance
    expected_length: float


@torch.no_grad()
def validate(run: Run, docs: Sequence[Document]) -> Validation:
    """How the drafter, drafting as far ahead as it trains for, does on held-out answers, over all ranks."""
    drafter: Drafter = run.accelerator.unwrap_model(run.model)
    num_drafts, device = drafter.num_drafts, run.accelerator.device
    rows = pack(lengths_of(docs), row_tokens=run.config.row_tokens, seed=0, epoch=0)
    size, world = run.config.rows_per_device, run.accelerator.num_processes
    total = Acceptance(0, (0,) * num_drafts)
    expected = torch.zeros(2, device=device)
    # Every rank drafts equally often, for sharded weights are gathered by all together; a rank without rows left drafts for
    # the first again, and does not count it.
    for start in range(0, len(rows), size * world):
        mine = rows[start : start + size * world][run.accelerator.process_index :: world]
        batch = run.teacher.batch([[docs[j] for j in row] for row in mine or rows[:1]])
        with run.accelerator.autocast():
            proposals = drafter.propose(batch, num_drafts=num_drafts)
            length_sum = torch.stack(drafter.expected_length(batch, run.teacher.head, num_drafts=num_drafts))
        if mine:
            total += acceptance(batch, proposals, num_drafts=num_drafts)
            expected += length_sum
    counts = torch.tensor([total.num_drafts, *total.accepted], device=device)
    drafts, *accepted = run.accelerator.reduce(counts, reduction="sum").tolist()
    length, num_places = run.accelerator.reduce(expected, reduction="sum").tolist()
    return Validation(Acceptance(drafts, tuple(accepted)), length / max(num_places, 1.0))


def save(run: Run, progress: Progress, acceptance_length: float | None) -> None:
    """Writes a checkpoint, with what it validated at (None: it did not), aside, then renames it into place; removes old ones."""
    accelerator, final = run.accelerator, run_folder.checkpoint_folder(run.folder, progress.step)
    aside = final.with_name(f".{final.name}.partial")
    if accelerator.is_main_process:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    accelerator.wait_for_everyone()
    with explain_full_disk(final):
        accelerator.save_state(str(aside / "state"))
        weights = accelerator.get_state_dict(run.model)
        if accelerator.is_main_process:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, aside / "drafter.safetensors")
            (aside / "progress.json").write_text(json.dumps({**asdict(progress), "acceptance_length": acceptance_length}))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        run_folder.commit_checkpoint(aside, final)
        run_folder.prune_checkpoints(run.folder, keep=run.config.keep_checkpoints)
    accelerator.wait_for_everyone()


def restore(run: Run, state: Path | None) -> Progress:
    """Puts the run where its newest checkpoint left it, weights, optimiser, schedule and random states; else at the start."""
    saved = run_folder.steps_saved(run.folder)
    if run.accelerator.is_main_process:
        run_folder.drop_metrics_after(run.folder, saved[-1] if saved else 0)
    if state is None:
        return Progress()
    run.accelerator.load_state(str(state))
    found = json.loads((run_folder.checkpoint_folder(run.folder, saved[-1]) / "progress.json").read_text())
    found.pop("acceptance_length")
    return Progress(**found)
