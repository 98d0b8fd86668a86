"""The training loop: the same update however rows are dealt, resume bit for bit, crashes that cost nothing."""

import errno
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.utils.file_baton import FileBaton
from transformers import AutoModelForCausalLM

import export.checkpoint
from data.batch import Batch, Text
from data.vocabulary import read_vocabulary
from drafters import dspark, eagle3
from drafters.drafter import FrozenTarget
from drafters.saved import Description, Saved, read_saved
from recipes.files import explain_full_disk, write_atomically
from recipes.load import RecipeError, build
from tests.conftest import ROOT, call_script, run_script, write_random_answers
from tests.forks import fork_script
from train import run_folder
from train.dspark import start_from
from train.launch import drop_stale_locks
from train.loop import OptimConfig, lr_share
from train.prepare import flat

RECIPE = """
name: tiny
target: {{model: {target}, dtype: float32}}
data: {{max_length: 40, test_share: 0.1, validation_share: 0.2}}
eagle3:
  drafter: {{draft_vocab_size: 100, num_steps: 2}}
  optim: {{lr: 1e-3, epochs: 10}}
dflash:
  drafter: {{num_layers: 2, block_size: 4, num_anchors: 6, aux_layers: [1, 4, 6], draft_vocab_size: 100}}
  optim: {{lr: 1e-3, epochs: 4}}
dspark:
  drafter: {{num_layers: 2, block_size: 4, num_anchors: 6, aux_layers: [1, 4, 6], draft_vocab_size: 100, markov_rank: 8}}
  optim: {{lr: 1e-3, epochs: 4}}
train: {{row_tokens: 64, rows_per_step: 4, rows_per_device: 4, validations: 4, log_every: 1, keep_checkpoints: 9,
  cpu_threads: 1, feature_cache_gib: 0.001}}  # of 1.5 MB, so that some documents' features are kept, and some are not
"""


@pytest.fixture
def workplace(tmp_path: Path, tiny_target: Path) -> Path:
    """A folder with a recipe for the tiny target, and answers made of random tokens."""
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(target=tiny_target))
    write_random_answers(tmp_path, 40)
    return tmp_path


def train(
    workplace: Path, *overrides: str, method: str = "eagle3", launcher: tuple[str, ...] = (), expect: int = 0
) -> subprocess.CompletedProcess[str]:
    words = (*launcher, str(ROOT / "train" / f"{method}.py"), "tiny.yaml", *overrides)
    return fork_script(*words, cwd=workplace, expect=expect)


TWO = ("-m", "accelerate.commands.launch", "--config_file", str(ROOT / "recipes/accelerate/cpu.yaml"), "--num_processes", "2")


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def final(run: Path) -> dict[str, torch.Tensor]:
    last = max((run / "checkpoints").glob("step-*"))
    # Cloned: load_file maps the file, and some tests go on to spoil it.
    return {name: tensor.clone() for name, tensor in load_file(last / "drafter.safetensors").items()}


def test_resume_is_exact_and_processes_and_micro_batches_change_nothing(workplace: Path) -> None:
    """One unbroken run; the same stopped by kill -9 half way and resumed; on two processes; in micro-batches of one row."""
    run_script(str(ROOT / "train" / "eagle3.py"), "tiny.yaml", cwd=workplace)
    whole = workplace / "runs" / "tiny-eagle3"
    curve = losses(whole)
    assert list(curve) == list(range(1, len(curve) + 1))
    assert len(curve) >= 16
    assert curve[len(curve)] < curve[1]
    assert {path.name for path in whole.iterdir()} >= {
        "recipe.yaml",
        "provenance.json",
        "vocabulary.json",
        "drafter.json",
        "metrics.jsonl",
    }

    kill_after_first_checkpoint(workplace, "train.tag=broken")
    broken = workplace / "runs" / "tiny-eagle3-broken"
    saved = run_folder.steps_saved(broken)
    assert saved[-1] < len(curve), "it was to be killed half way"
    train(workplace, "train.tag=broken")
    assert losses(broken) == curve
    for name, tensor in final(whole).items():
        assert torch.equal(final(broken)[name], tensor), name

    again = train(workplace)
    assert "next: python export/checkpoint.py runs/tiny-eagle3" in again.stdout
    assert losses(whole) == curve

    train(workplace, "train.tag=again", "train.gradient_checkpointing=true")
    assert losses(workplace / "runs" / "tiny-eagle3-again") == curve

    train(workplace, "train.tag=two", launcher=TWO)
    train(workplace, "train.tag=small", "train.rows_per_device=1")
    for name in ("two", "small"):
        other = losses(workplace / "runs" / f"tiny-eagle3-{name}")
        assert other.keys() == curve.keys()
        assert max(abs(other[step] - curve[step]) for step in curve) < 1e-5, name


def test_two_processes_killed_go_on_exactly_and_one_goes_on_for_both(workplace: Path) -> None:
    """kill -9 of two processes half way: on two again the curve is the unbroken run's, bit for bit; on one the same rows come in
    the same steps, so that it is within rounding."""
    train(workplace, "train.tag=two", launcher=TWO)
    curve = losses(workplace / "runs" / "tiny-eagle3-two")
    for name, launcher in (("again-on-two", TWO), ("on-one", ())):
        kill_after_first_checkpoint(workplace, f"train.tag={name}", launcher=TWO)
        run = workplace / "runs" / f"tiny-eagle3-{name}"
        assert run_folder.steps_saved(run)[-1] < len(curve), "it was to be killed half way"
        train(workplace, f"train.tag={name}", launcher=launcher)
        other = losses(run)
        assert other.keys() == curve.keys()
        assert other == curve if launcher else max(abs(other[step] - curve[step]) for step in curve) < 1e-5


def test_ranks_without_a_label_neither_hang_nor_skew(workplace: Path) -> None:
    """Each row is one document with one place to draft from, and few of the target's tokens are in the draft vocabulary: most
    rows have no label, some steps none at all. Two processes, of a row a step each, give the curve of one. An epoch has 15 rows,
    the validation 7: both ends are uneven, and both processes come to them together."""
    write_random_answers(workplace, 40, supervised=2)
    settings = ("train.row_tokens=40", "train.rows_per_step=2", "train.rows_per_device=1", "eagle3.drafter.draft_vocab_size=8")
    train(workplace, *settings, "train.tag=one")
    train(workplace, *settings, "train.tag=two", launcher=TWO)
    one, two = (losses(workplace / "runs" / f"tiny-eagle3-{name}") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert max(abs(one[step] - two[step]) for step in one) < 1e-5
    assert len(one) == 75, "15 rows, ten times, two a step"
    assert 0.0 in one.values()
    assert max(one.values()) > 0


def test_block_drafters_train(workplace: Path) -> None:
    """DFlash, and from its backbone DSpark: on one process, stopped and resumed, and on two that share the target, the anchors
    drawn are the same, and so is the curve; DSpark ends calibrated, its export scaled; another kind of run is no warm start."""
    warm = "dspark.warm_start=runs/tiny-dflash"
    for method, more in (("dflash", ()), ("dspark", (warm,))):
        train(workplace, *more, method=method)
        curve = losses(workplace / "runs" / f"tiny-{method}")
        # Every step's rows are others, and the answers are random: a mean over some.
        assert mean(curve[step] for step in (7, 8, 9)) < mean(curve[step] for step in (1, 2, 3))
        train(workplace, *more, "train.tag=two", "target.sharded=true", method=method, launcher=TWO)
        two = losses(workplace / "runs" / f"tiny-{method}-two")
        assert two.keys() == curve.keys()
        assert max(abs(two[step] - curve[step]) for step in curve) < 1e-5
        kill_after_first_checkpoint(workplace, *more, "train.tag=broken", method=method)
        broken = workplace / "runs" / f"tiny-{method}-broken"
        assert run_folder.steps_saved(broken)[-1] < len(curve), "it was to be killed half way"
        train(workplace, *more, "train.tag=broken", method=method)
        assert losses(broken) == curve

    run = workplace / "runs" / "tiny-dspark"
    saved, flash = read_saved(run), read_saved(workplace / "runs" / "tiny-dflash")
    drafter = dspark.rebuild(saved, None)
    start_from(drafter, workplace / "runs" / "tiny-dflash", shape=saved.description.shape)
    assert all(torch.equal(drafter.state_dict()[name], weight) for name, weight in flash.weights.items())
    drafter.backbone = replace(drafter.backbone, causal=True, aux_layers=(1, 4, 7))
    with pytest.raises(
        RecipeError, match=r"does not fit: aux_layers \[1, 4, 6\] instead of \[1, 4, 7\]; causal False instead of True"
    ):
        start_from(drafter, workplace / "runs" / "tiny-dflash", shape=saved.description.shape)
    before = (run / "calibration.json").stat().st_mtime_ns
    train(workplace, warm, method="dspark")
    assert (run / "calibration.json").stat().st_mtime_ns == before, "there was nothing left to do"
    assert set(saved.calibration) == {"step", "of_all", "of_each"}
    assert len(saved.calibration["of_each"]) == 4
    call_script(export.checkpoint.main, "runs/tiny-dspark", cwd=workplace)
    exported = load_file(run / "export" / "model.safetensors")["confidence_head.proj.weight"]
    trained = saved.weights["confidence_head.proj.weight"]
    torch.testing.assert_close(exported * saved.calibration["of_all"]["temperature"], trained)
    refused = train(workplace, "dspark.warm_start=runs/tiny-dspark", "train.tag=other", method="dspark", expect=2)
    assert "dspark.warm_start is runs/tiny-dspark, which does not fit: method dspark; give a DFlash run" in refused.stderr


def train_sharded(workplace: Path, engine: str, method: str, *overrides: str, processes: int = 2) -> None:
    """Trains under a shipped configuration, but over gloo, for so many processes and in fp32."""
    shipped = engine.replace("zero1", "zero2")  # whose file says how to make it that
    settings = yaml.safe_load((ROOT / "recipes" / "accelerate" / f"{shipped}_8.yaml").read_text())
    settings["num_processes"] = processes
    if engine == "fsdp2":
        settings["mixed_precision"] = "no"
    else:
        zero = json.loads((ROOT / settings["deepspeed_config"]["deepspeed_config_file"]).read_text())
        # Sharded is what has more weights than the threshold, of which a tiny drafter has none.
        zero["zero_optimization"] |= {"stage": int(engine.removeprefix("zero")), "stage3_param_persistence_threshold": 0}
        (workplace / "zero.json").write_text(json.dumps({**zero, "torch_autocast": {"enabled": False}}))
        settings["deepspeed_config"]["deepspeed_config_file"] = "zero.json"
    (workplace / "engine.yaml").write_text(yaml.safe_dump(settings))
    launch = ("-m", "accelerate.commands.launch", "--config_file", "engine.yaml", str(ROOT / "tests" / "sharded_on_cpu.py"))
    fork_script(*launch, str(ROOT / "train" / f"{method}.py"), *overrides, cwd=workplace, ACCELERATE_TORCH_DEVICE="cpu")


@pytest.mark.parametrize(
    ("method", "engines"),
    [("eagle3", ("fsdp2", "zero1", "zero2", "zero3")), ("dflash", ("fsdp2", "zero3")), ("dspark", ("fsdp2", "zero3"))],
)
def test_sharded_engines_give_the_same_curve(method: str, engines: tuple[str, ...], workplace: Path) -> None:
    """The shipped configurations, but over gloo, for two processes and in fp32, the target sharded, too: the curve of one process,
    and a drafter that export finds. Micro-batches of one row, so that a step is more than one backward; clipping is at work; the
    MLPs are computed again in the backward."""
    overrides = ("tiny.yaml", f"{method}.optim.epochs=3", "train.rows_per_device=1", f"{method}.optim.max_grad_norm=0.2")
    fork_script(str(ROOT / "train" / f"{method}.py"), *overrides, cwd=workplace)
    alone = workplace / "runs" / f"tiny-{method}"
    curve = losses(alone)
    for engine in engines:
        more = ("target.sharded=true", "train.gradient_checkpointing=true", f"train.tag={engine}")
        train_sharded(workplace, engine, method, *overrides, *more)
        sharded = workplace / "runs" / f"tiny-{method}-{engine}"
        other = losses(sharded)
        assert other.keys() == curve.keys()
        assert max(abs(other[step] - curve[step]) for step in curve) < 1e-5
        for name, tensor in final(alone).items():
            torch.testing.assert_close(final(sharded)[name], tensor, rtol=0, atol=1e-4)
        assert read_saved(sharded).acceptance_length == pytest.approx(read_saved(alone).acceptance_length)


@pytest.mark.parametrize("engine", ["fsdp2", "zero2", "zero3"])
def test_sharded_engines_go_on_with_fewer_processes(engine: str, workplace: Path) -> None:
    """From the first checkpoint of two processes, one process gives the rest of their curve."""
    overrides = ("tiny.yaml", "eagle3.optim.epochs=3", "train.rows_per_device=1", f"train.tag={engine}")
    train_sharded(workplace, engine, "eagle3", *overrides)
    run = workplace / "runs" / f"tiny-eagle3-{engine}"
    curve = losses(run)
    first, *later = run_folder.steps_saved(run)
    for step in later:
        shutil.rmtree(run_folder.checkpoint_folder(run, step))
    train_sharded(workplace, engine, "eagle3", *overrides, processes=1)
    other = losses(run)
    assert first < max(other)
    assert other.keys() == curve.keys()
    assert max(abs(other[step] - curve[step]) for step in curve) < 1e-5


def test_bf16_trains_fp32_weights(workplace: Path) -> None:
    """Under autocast to bf16 the curve is near that of fp32 and not the same; the weights stay fp32; the moments do, too."""
    train(workplace, "eagle3.optim.epochs=3")
    words = (str(ROOT / "train" / "eagle3.py"), "tiny.yaml", "eagle3.optim.epochs=3", "train.tag=bf16")
    fork_script(*words, cwd=workplace, ACCELERATE_MIXED_PRECISION="bf16")
    exact, rough = (losses(workplace / "runs" / f"tiny-eagle3{tag}") for tag in ("", "-bf16"))
    apart = [abs(exact[step] - rough[step]) for step in exact]
    assert 1e-5 < max(apart) < 0.05
    run = workplace / "runs" / "tiny-eagle3-bf16"
    assert {tensor.dtype for tensor in final(run).values()} == {torch.float32}
    state = torch.load(max((run / "checkpoints").glob("step-*")) / "state" / "optimizer.bin", weights_only=True)["state"]
    assert {moments["exp_avg"].dtype for moments in state.values()} == {torch.float32}


def kill_after_first_checkpoint(workplace: Path, *overrides: str, method: str = "eagle3", launcher: tuple[str, ...] = ()) -> None:
    """The last override is the run's train.tag."""
    command = [sys.executable, *launcher, str(ROOT / "train" / f"{method}.py"), "tiny.yaml", *overrides]
    process = subprocess.Popen(command, cwd=workplace, stderr=subprocess.DEVNULL)
    run = workplace / "runs" / f"tiny-{method}-{overrides[-1].partition('=')[2]}"
    while process.poll() is None and not run_folder.steps_saved(run):
        time.sleep(0.005)
    # A launcher's processes are in sessions of their own.
    for one in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
        one.kill()
    process.wait()


def test_told_to_leave(workplace: Path) -> None:
    """By a signal, alone or two under the launcher, and by the clock: a checkpoint of the very step, status 75 (the launcher makes
    it 1), and in the end the weights of an unbroken run, bit for bit."""
    train(workplace)
    whole = workplace / "runs" / "tiny-eagle3"
    for tag, launcher in (("alone", ()), ("two", TWO)):
        command = [sys.executable, *launcher, str(ROOT / "train" / "eagle3.py"), "tiny.yaml", f"train.tag={tag}"]
        process = subprocess.Popen(command, cwd=workplace, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        run = workplace / "runs" / f"tiny-eagle3-{tag}"
        while process.poll() is None and not ((run / "metrics.jsonl").is_file() and len(losses(run)) > 2):
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=120)
        assert process.returncode == (1 if launcher else 75)
        (number,) = re.findall(r"SIGTERM: left at step (\d+) of \d+; the same command goes on there", shown)
        step = int(number)
        assert run_folder.steps_saved(run)[-1] == step == max(losses(run)) < max(losses(whole))
        train(workplace, f"train.tag={tag}", launcher=launcher)
        assert losses(run).keys() == losses(whole).keys()
    assert losses(workplace / "runs" / "tiny-eagle3-alone") == losses(whole)
    for name, tensor in final(whole).items():
        assert torch.equal(final(workplace / "runs" / "tiny-eagle3-alone")[name], tensor), name

    left = train(workplace, "train.tag=clock", "train.max_hours=1e-9", expect=75)
    assert "train.max_hours: left at step 1 of" in left.stdout
    clock = workplace / "runs" / "tiny-eagle3-clock"
    assert (clock / "left-early").read_text() == "train.max_hours\n"
    refused = call_script(export.checkpoint.main, "runs/tiny-eagle3-clock", cwd=workplace, expect=2)
    assert "has no validated checkpoint yet; train it first, or to its next validation" in refused.stderr
    # Another launch may last longer, and may be of a version that has more settings.
    recipe = clock / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("  patience: null\n", "").replace("  sharded: false\n", ""))
    train(workplace, "train.tag=clock")
    assert losses(clock) == losses(whole)
    assert not (clock / "left-early").exists()


def test_a_run_has_one_launch_at_a_time(workplace: Path) -> None:
    """A second one while the first trains is refused, and changes nothing; the next goes on behind the checkpoint, and says so."""
    command = [sys.executable, str(ROOT / "train" / "eagle3.py"), "tiny.yaml", "eagle3.optim.epochs=300"]
    first = subprocess.Popen(command, cwd=workplace, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = workplace / "runs" / "tiny-eagle3"
    while first.poll() is None and not (run / "metrics.jsonl").is_file():
        time.sleep(0.01)
    refused = train(workplace, "eagle3.optim.epochs=300", expect=2)
    assert "error: another process writes runs/tiny-eagle3 at this moment; wait for its end, or stop it" in refused.stderr
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 75
    rows = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows == sorted(rows)
    step = run_folder.steps_saved(run)[-1]
    again = train(workplace, "eagle3.optim.epochs=300", "train.max_hours=1e-9", expect=75)
    assert f"runs/tiny-eagle3 goes on behind step {step} of " in again.stdout


def test_a_target_that_is_no_number(workplace: Path, tiny_target: Path, tmp_path: Path) -> None:
    """It is not the learning rate that is to blame."""
    broken = tmp_path / "broken"
    shutil.copytree(tiny_target, broken)
    weights = {name: tensor.clone() for name, tensor in load_file(broken / "model.safetensors").items()}
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    refused = train(workplace, f"target.model={broken}", expect=2)
    assert "the target's own states are no numbers: see its checkpoint, and target.dtype" in refused.stderr


def test_ends_before_the_last_epoch(workplace: Path) -> None:
    """After max_steps; or when patience is over, here with a learning rate that changes nothing; started again, nothing is left."""
    train(workplace, "train.tag=short", "train.max_steps=3")
    short = workplace / "runs" / "tiny-eagle3-short"
    assert list(losses(short)) == [1, 2, 3]
    rates = [json.loads(line)["lr"] for line in (short / "metrics.jsonl").read_text().splitlines() if "lr" in line]
    assert rates[-1] == pytest.approx(1e-3 * 0.02), "the schedule ends there, too"
    words = ("train.tag=stuck", "train.patience=2", "eagle3.optim.lr=1e-12", "train.validations=20")
    ended = train(workplace, *words).stdout
    assert "train.patience: no longer acceptance length in 2 validations; ended at step " in ended
    stuck = workplace / "runs" / "tiny-eagle3-stuck"
    assert len(run_folder.steps_saved(stuck)) == 3, "the first validation is the best, then two that are no better"
    assert "nothing to do" in train(workplace, *words).stdout
    assert "train.max_hours is 0.0; give more than 0, or null" in train(workplace, "train.max_hours=0", expect=2).stderr


def test_a_gradient_that_is_no_number(workplace: Path, tiny_target: Path) -> None:
    """It does not reach the weights; weights and batch are saved, and show it again. Here they overflow at an absurd rate."""
    refused = train(workplace, "eagle3.optim.lr=1e30", "train.tag=wild", expect=2)
    last = refused.stderr.strip().splitlines()[-1]
    (step,) = re.findall(r"error: the gradient is no number at step (\d+), and was not used;", last)
    run = workplace / "runs" / "tiny-eagle3-wild"
    assert int(step) == max(losses(run)) + 1
    folder = run / f"nonfinite-{int(step):06d}"
    weights = load_file(folder / "drafter.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    tensors = load_file(folder / "batch-0-0.safetensors")
    text = Text(**{field.name: tensors.pop(field.name) for field in fields(Text)})
    batch = Batch(text, **tensors)
    rows = json.loads((folder / "rows-0.json").read_text())
    assert len(rows) == len(batch.text.tokens_BT) == 4
    description = build(Description, json.loads((run / "drafter.json").read_text()), "drafter.json")
    saved = Saved(run, description, read_vocabulary(run / "vocabulary.json").kept_W, weights, int(step), 0.0, {})
    frozen = FrozenTarget.of(AutoModelForCausalLM.from_pretrained(tiny_target))
    assert not eagle3.rebuild(saved, frozen)(batch).loss_sum.isfinite()


def test_kill_during_a_save_loses_no_earlier_checkpoint(workplace: Path) -> None:
    """A half-written checkpoint beside a whole one is passed over, and then replaced."""
    train(workplace, "eagle3.optim.epochs=2")
    run = workplace / "runs" / "tiny-eagle3"
    curve, weights = losses(run), final(run)
    last = run_folder.steps_saved(run)[-1]
    whole = run_folder.checkpoint_folder(run, last)
    partial = whole.with_name(f".{whole.name}.partial")
    whole.rename(partial)
    (partial / "drafter.safetensors").write_bytes(b"half")
    assert run_folder.steps_saved(run)[-1] < last
    train(workplace, "eagle3.optim.epochs=2")
    assert run_folder.steps_saved(run)[-1] == last
    assert losses(run) == curve
    assert all(torch.equal(final(run)[name], tensor) for name, tensor in weights.items())
    assert not partial.exists()


def test_other_values_or_other_data_are_refused(workplace: Path) -> None:
    """A run folder belongs to one recipe and one set of answers; nothing in it is touched otherwise."""
    train(workplace, "eagle3.optim.epochs=1")
    run = workplace / "runs" / "tiny-eagle3"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    refused = train(workplace, "eagle3.optim.epochs=1", "eagle3.optim.lr=5e-4", expect=2)
    assert refused.stderr.strip().splitlines()[-1] == (
        "error: runs/tiny-eagle3 was made with other values of eagle3.optim.lr; give this run a train.tag, or delete that folder"
    )
    answers = workplace / "runs" / "tiny-data" / "answers.jsonl"
    answers.write_text("".join(answers.read_text().splitlines(keepends=True)[:30]))
    refused = train(workplace, "eagle3.optim.epochs=1", expect=2)
    assert "vocabulary.json was made for another training data" in refused.stderr
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    vocabulary = json.loads((run / "vocabulary.json").read_text())
    vocabulary["made_from"]["target"] = "that of another tokenizer"
    (run / "vocabulary.json").write_text(json.dumps(vocabulary))
    refused = train(workplace, "eagle3.optim.epochs=1", expect=2)
    assert "vocabulary.json was made for another target (fingerprint that of another tokenizer, this recipe's is " in refused.stderr


def test_a_lone_process_that_should_have_company_is_refused(workplace: Path) -> None:
    """accelerate's CPU launcher starts one process whatever --num_processes says, and says nothing."""
    launcher = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2")
    # What was asked for is read from the launcher's command line, which one that was forked does not have.
    refused = run_script(*launcher, str(ROOT / "train" / "eagle3.py"), "tiny.yaml", cwd=workplace, expect=1)
    assert "2 processes were asked for, but this one trains alone" in refused.stderr
    assert "--config_file recipes/accelerate/cpu.yaml --num_processes 2" in refused.stderr
    words = (str(ROOT / "train" / "eagle3.py"), "tiny.yaml")
    refused = fork_script(*words, cwd=workplace, expect=2, ACCELERATE_MIXED_PRECISION="fp16")
    assert "mixed_precision is fp16, whose gradients overflow by design; give bf16, or no" in refused.stderr


def test_full_disk_while_saving(workplace: Path) -> None:
    """Files may hold 200 KB, a checkpoint needs more: one line, status 2, no half checkpoint; with room it goes on to the end."""
    code = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, -1));"
        f"sys.argv[0] = {str(ROOT / 'train' / 'eagle3.py')!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    refused = run_script("-c", code, "tiny.yaml", "eagle3.optim.epochs=1", cwd=workplace, expect=2)
    last = refused.stderr.strip().splitlines()[-1]
    assert last.startswith("error: the disk of runs/tiny-eagle3/checkpoints is full; free some space")
    run = workplace / "runs" / "tiny-eagle3"
    assert run_folder.steps_saved(run) == []
    train(workplace, "eagle3.optim.epochs=1")
    steps = list(losses(run))
    assert steps == list(range(1, len(steps) + 1))
    assert run_folder.steps_saved(run)[-1] == len(steps)


def test_full_disk_keeps_what_is_there(tmp_path: Path) -> None:
    """A write that fails for want of space leaves the file there was."""
    path = tmp_path / "a.json"
    write_atomically(path, "first")
    code = (
        "import resource; from pathlib import Path; from recipes.files import write_atomically;"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1)); write_atomically(Path({str(path)!r}), 'x' * 2000)"
    )
    failed = run_script("-c", code, cwd=tmp_path, expect=1)
    assert "RecipeError: the disk of" in failed.stderr
    assert path.read_text() == "first"


def test_a_write_error_of_another_kind_passes(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), explain_full_disk(tmp_path / "x"):
        raise PermissionError(errno.EACCES, "no")


def test_pruning_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step, length in ((10, 2.0), (20, 2.5), (30, 2.4), (40, 2.5)):
        folder = run_folder.checkpoint_folder(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / "progress.json").write_text(json.dumps({"acceptance_length": length}))
    run_folder.prune_checkpoints(tmp_path, keep=9)
    assert run_folder.steps_saved(tmp_path) == [10, 20, 30, 40]
    run_folder.prune_checkpoints(tmp_path, keep=1)
    assert run_folder.steps_saved(tmp_path) == [20, 40]


def test_locks_of_killed_builds_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed's extensions are built under a lock; the builder holds it open. What another machine may hold is only named, until
    it is too old."""
    held, left = tmp_path / "py311_cpu" / "held" / "lock", tmp_path / "py311_cpu" / "left" / "lock"
    for lock in (held, left):
        lock.parent.mkdir(parents=True)
    left.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    baton = FileBaton(str(held))
    assert baton.try_acquire()
    drop_stale_locks()
    assert left.exists()
    assert f"DeepSpeed waits for {left}; if no build is running anywhere, delete that file" in capsys.readouterr().err
    for lock in (held, left):
        os.utime(lock, (0, 0))
    drop_stale_locks()
    assert held.exists()
    assert not left.exists()
    baton.release()


def test_trackers_that_are_not_there(workplace: Path) -> None:
    """accelerate would say of an unknown one a traceback, and nothing at all of one that is not installed."""
    main = importlib.import_module("train.eagle3").main
    refused = call_script(main, "tiny.yaml", "train.trackers=[wandbb]", cwd=workplace, expect=2)
    assert "train.trackers has wandbb; give any of aim, " in refused.stderr
    refused = call_script(main, "tiny.yaml", "train.trackers=[aim]", cwd=workplace, expect=2)
    assert "train.trackers has aim, which is not installed; pip install aim" in refused.stderr


def test_trackers_get_no_secrets() -> None:
    secrets = {"a": ["https://me:pa55@host/x.jsonl", "s3://bucket/x"], "b": {"row_tokens": 40, "t": "hf_" + "A1b2" * 8}}
    assert flat(secrets) == {"a": "['https://***@host/x.jsonl', 's3://bucket/x']", "b.row_tokens": "40", "b.t": "***"}


def test_lr_schedule_by_hand() -> None:
    """100 steps, 10 of warm-up: a tenth at first, the whole at the tenth, half-way down in the middle, the floor at the end."""
    optim = OptimConfig(warmup_share=0.1, final_lr_share=0.1)
    assert lr_share(0, 100, optim) == pytest.approx(0.1)
    assert lr_share(9, 100, optim) == pytest.approx(1.0)
    assert lr_share(10, 100, optim) == pytest.approx(1.0)
    assert lr_share(55, 100, optim) == pytest.approx(0.55)
    assert lr_share(100, 100, optim) == pytest.approx(0.1)


def test_metrics_of_a_resumed_run_are_not_doubled(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        run_folder.append_metrics(tmp_path, {"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a full disk
    run_folder.drop_metrics_after(tmp_path, 2)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [{"step": 1}, {"step": 2}]
