"""Fifty kills at random moments of a run: python -m pytest -m slow tests/test_train_kills.py (some ten minutes)."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT, write_random_answers
from train import run_folder

KILLS = 50
RECIPE = """
name: tiny
target: {{model: {target}, dtype: float32}}
data: {{max_length: 40, test_share: 0.1, validation_share: 0.2}}
eagle3:
  drafter: {{draft_vocab_size: 100, num_steps: 2}}
  optim: {{lr: 1e-3, epochs: {epochs}}}
train: {{row_tokens: 64, rows_per_step: 4, rows_per_device: 4, validations: {validations}, log_every: 1, cpu_threads: 1}}
"""


def launch(workplace: Path, *overrides: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "train" / "eagle3.py"), "tiny.yaml", *overrides]
    with (workplace / "stderr").open("ab") as file:
        return subprocess.Popen(command, cwd=workplace, stderr=file)


def steps_logged(run: Path) -> int:
    """The last step of a run's metrics, 0 where there are none."""
    file = run / "metrics.jsonl"
    lines = file.read_text().rpartition("\n")[0].splitlines() if file.is_file() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


@pytest.mark.slow
def test_fifty_kills(tmp_path: Path, tiny_target: Path) -> None:
    """Whenever it is killed, also while it starts, saves or prunes: the next launch goes on, and at the end the weights and the
    curve are those of a run that nobody killed."""
    rng = random.Random(0)
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(target=tiny_target, epochs=400, validations=200))
    write_random_answers(tmp_path, 40)
    whole, broken = tmp_path / "runs" / "tiny-eagle3", tmp_path / "runs" / "tiny-eagle3-broken"
    process, start = launch(tmp_path), time.monotonic()
    while steps_logged(whole) < 1 and process.poll() is None:
        time.sleep(0.01)
    starting = time.monotonic() - start
    assert process.wait() == 0
    total = steps_logged(whole)
    for kill in range(KILLS):
        process = launch(tmp_path, "train.tag=broken")
        if kill % 2:  # in the start, or soon behind it
            time.sleep(rng.uniform(0.1, 1.2) * starting)
        else:  # when so many steps are done, and some moments later: fifty lives reach the end at most
            reached, seen = steps_logged(broken), time.monotonic()
            due = rng.randint(reached, max(reached, total * (kill + 1) // (KILLS + 10))) + 1
            while steps_logged(broken) < due and process.poll() is None:
                assert time.monotonic() < seen + 300, f"it stands at step {steps_logged(broken)}"
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.3))
        assert process.poll() is None, (tmp_path / "stderr").read_text()[-1000:]
        process.kill()
        process.wait()
    print(f"{KILLS} kills, the last at step {(run_folder.steps_saved(broken) or [0])[-1]} of {run_folder.steps_saved(whole)[-1]}")
    assert launch(tmp_path, "train.tag=broken").wait() == 0, (tmp_path / "stderr").read_text()[-1000:]
    last = run_folder.steps_saved(whole)[-1]
    assert run_folder.steps_saved(broken)[-1] == last
    one, other = (load_file(run_folder.checkpoint_folder(run, last) / "drafter.safetensors") for run in (whole, broken))
    assert all(torch.equal(one[name], other[name]) for name in one)
    curves = []
    for run in (whole, broken):
        logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        curves.append([(row["step"], row.get("loss"), row.get("validation/acceptance_length")) for row in logged])
    assert curves[0] == curves[1]
