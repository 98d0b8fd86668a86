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

from tests.conftest import ROOT, run_script, write_random_answers
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


@pytest.mark.slow
def test_fifty_kills(tmp_path: Path, tiny_target: Path) -> None:
    """Whenever it is killed, also while it starts, saves or prunes: the next launch goes on, and at the end the weights and the
    curve are those of a run that nobody killed."""
    rng = random.Random(0)
    epochs, validations = 400, 200
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(target=tiny_target, epochs=epochs, validations=validations))
    write_random_answers(tmp_path, 40)
    script = str(ROOT / "train" / "eagle3.py")
    start = time.monotonic()
    run_script(script, "tiny.yaml", cwd=tmp_path)
    whole, lifetime = tmp_path / "runs" / "tiny-eagle3", time.monotonic() - start
    broken = tmp_path / "runs" / "tiny-eagle3-broken"
    for kill in range(KILLS):
        process = subprocess.Popen([sys.executable, script, "tiny.yaml", "train.tag=broken"], cwd=tmp_path, stderr=subprocess.PIPE)
        # Half of them within the start and the first steps, the others behind them, as far as fifty lives have to carry it.
        time.sleep(rng.uniform(1.0, 16.0 if kill % 2 else 8.0) * max(1.0, lifetime / 300))
        assert process.poll() is None, (process.stderr.read() if process.stderr else b"").decode()[-500:] or "it ended too early"
        process.kill()
        process.wait()
    print(f"{KILLS} kills, the last at step {(run_folder.steps_saved(broken) or [0])[-1]} of {run_folder.steps_saved(whole)[-1]}")
    run_script(script, "tiny.yaml", "train.tag=broken", cwd=tmp_path)
    last = run_folder.steps_saved(whole)[-1]
    assert run_folder.steps_saved(broken)[-1] == last
    one, other = (load_file(run_folder.checkpoint_folder(run, last) / "drafter.safetensors") for run in (whole, broken))
    assert all(torch.equal(one[name], other[name]) for name in one)
    curves = []
    for run in (whole, broken):
        logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        curves.append([(row["step"], row.get("loss"), row.get("validation/acceptance_length")) for row in logged])
    assert curves[0] == curves[1]
