"""The benchmark of plans of eval/bench.py: what recipes/plan.py says of this CPU, beside what training takes."""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from recipes.load import ROOT, RecipeError
from recipes.progress import progress_bar

CASES = {
    "eagle3-w8192": ("eagle3", "eagle3.drafter.draft_vocab_size=8192"),
    "eagle3-full": ("eagle3",),
    "eagle3-short-rows": ("eagle3", "eagle3.drafter.draft_vocab_size=8192", "train.row_tokens=384"),
    "eagle3-checkpointed": ("eagle3", "eagle3.drafter.draft_vocab_size=8192", "train.gradient_checkpointing=true"),
    "eagle3-four-rows": ("eagle3", "eagle3.drafter.draft_vocab_size=8192", "train.rows_per_step=4"),
    "eagle3-cached": ("eagle3", "eagle3.drafter.draft_vocab_size=8192", "train.feature_cache_gib=0.5"),
    "dflash": ("dflash",),
    "dspark": ("dspark",),
}
WORDS = ("the", "of", "and", "a", "river", "stone", "light", "engine", "number", "seven", "reads", "quickly", "under", "green")
RECIPE = """
name: planned
target: {{model: "{target}", dtype: float32}}
data: {{answered: [conversations.jsonl], max_length: 256, validation_share: 0.02, test_share: 0.02}}
eagle3: {{drafter: {{draft_vocab_size: null, num_steps: 3}}}}
dflash: {{drafter: {{num_layers: 2, block_size: 8, num_anchors: 96}}}}
dspark: {{drafter: {{num_layers: 2, block_size: 8, num_anchors: 96}}}}
train: {{row_tokens: 2048, rows_per_step: 2, rows_per_device: 2, validations: 1, log_every: 1, max_steps: 5}}
"""


def planned(target: str) -> Iterator[dict[str, Any]]:
    """See eval/bench.py."""
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), random.Random(0)
        rows = []
        for _ in range(400):
            words = [rng.choice(WORDS) for _ in range(160)]
            ask, answer = " ".join(words[:60]), " ".join(words[60 : rng.randint(80, 160)])
            rows.append({"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]})
        (folder / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "planned.yaml").write_text(RECIPE.format(target=target))
        for case, (method, *overrides) in progress_bar(CASES.items(), "recipes"):
            # Before and after, for a machine's speed changes within a minute.
            said = [_plan(method, overrides, cwd=folder)]
            _run("train", f"{method}.py", *overrides, f"train.tag={case}", cwd=folder)
            said.append(_plan(method, overrides, cwd=folder))
            lines = (folder / "runs" / f"planned-{method}-{case}" / "metrics.jsonl").read_text().splitlines()
            logged = [row for row in map(json.loads, lines) if "loss" in row]
            rate = median(row["tokens_per_s"] for row in logged[1:])  # the first step warms up
            cached = "cached" in case  # whose steps do not run the target for what is kept
            yield {
                "case": case,
                "tokens_per_s": rate,
                "planned_speed_ratio": None if cached else mean(one["tokens_per_s"] for one in said) / rate,
                "peak_gib": logged[-1]["peak_memory_gib"],
                "planned_memory_ratio": said[-1]["memory"] / 2**30 / logged[-1]["peak_memory_gib"],
            }


def _plan(method: str, overrides: list[str], *, cwd: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads(_run("recipes", "plan.py", "--json", *overrides, cwd=cwd).splitlines()[-1])[method]
    return found


def _run(room: str, script: str, *words: str, cwd: Path) -> str:
    command = [sys.executable, str(ROOT / room / script), "planned.yaml", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RecipeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout
