"""The tokenising benchmark of eval/bench.py. Times are wall clock; memory is the sum over all processes of a run at its highest."""

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from data.target import TargetConfig, resolve_target
from recipes.load import RecipeError
from recipes.progress import progress_bar

PLAIN = """
import sys
from datasets import load_dataset
from transformers import AutoTokenizer

path, target, num_proc, batched, cache = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(target)

def tokenise(rows):
    texts = tokenizer.apply_chat_template(rows["messages"], tokenize=False)
    return {"tokens": tokenizer(texts, add_special_tokens=False)["input_ids"]}

rows = load_dataset("json", data_files=path, split="train", cache_dir=cache)
print(len(rows.map(tokenise, batched=batched == "batched", num_proc=int(num_proc), remove_columns=rows.column_names)))
"""

OURS = """
import sys
from pathlib import Path
from data.chat import Chat
from data.conversations import DataConfig
from data.documents import open_documents
from data.packing import pack
from data.sources import Source

path, target, num_proc = sys.argv[1:]
data = DataConfig(answered=(Source(path),), num_proc=int(num_proc))
documents = open_documents(data, "bench", chat=Chat.load(Path(target)), target="bench").split("train")
rows = pack(documents.lengths, row_tokens=data.max_length, seed=0, epoch=0)
print(len(documents), sum(documents.lengths) / (len(rows) * data.max_length))
"""


class Run(NamedTuple):
    """One run: wall clock seconds, most bytes of memory at a time, what it printed."""

    seconds: float
    peak_bytes: int
    printed: str


def run(script: str, *words: str, cwd: Path) -> Run:
    """Runs Python code in a process of its own."""
    start, peak = time.monotonic(), 0
    with (cwd / "stderr.txt").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *words], cwd=cwd, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        root = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, _memory(root))
            time.sleep(0.2)
    seconds = time.monotonic() - start
    assert process.stdout is not None
    if process.returncode:
        raise RecipeError(f"a run ended with {process.returncode}: {(cwd / 'stderr.txt').read_text()[-500:]}")
    return Run(seconds, peak, process.stdout.read().strip().splitlines()[-1])


def _memory(root: psutil.Process) -> int:
    total = 0
    for process in [root, *_children(root)]:
        try:
            # Pages that a child shares with its parent, or that map a file, count once: for each its share.
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def _children(root: psutil.Process) -> list[psutil.Process]:
    try:
        return root.children(recursive=True)
    except psutil.Error:
        return []


def write_conversations(path: Path, number: int) -> None:
    """Conversations of one to three turns, of lengths as people's have: log-normal, 200 words in the median."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmfwypvbgk", k=rng.randint(2, 9))) for _ in range(5000)]

    def say(mean_words: float) -> str:
        return " ".join(rng.choices(words, k=max(1, round(rng.lognormvariate(0.0, 0.8) * mean_words))))

    with path.open("w") as file:
        for _ in range(number):
            messages = []
            for _ in range(rng.choice((1, 1, 2, 3))):
                messages += [{"role": "user", "content": say(25)}, {"role": "assistant", "content": say(80)}]
            file.write(json.dumps({"messages": messages}) + "\n")


def tokenising(conversations: int, *, target: str, num_proc: int, repeats: int) -> list[dict[str, Any]]:
    """See eval/bench.py."""
    folder_of_target = str(resolve_target(TargetConfig(target)))
    runs: dict[str, list[Run]] = {"ours": [], "plain": [], "batched": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_conversations(folder / "rows.jsonl", conversations)
        turns = [kind for repeat in range(repeats) for kind in (runs if repeat % 2 == 0 else reversed(runs))]
        for kind in progress_bar(turns, "runs"):
            aside = Path(tempfile.mkdtemp(dir=folder))
            words = [str(folder / "rows.jsonl"), folder_of_target, str(num_proc)]
            script, more = (OURS, []) if kind == "ours" else (PLAIN, [kind, str(aside)])
            runs[kind].append(run(script, *words, *more, cwd=aside))
            shutil.rmtree(aside)
    seconds = {kind: median(one.seconds for one in found) for kind, found in runs.items()}
    peak = {kind: max(one.peak_bytes for one in found) for kind, found in runs.items()}
    return [
        {
            "case": "tokenising",
            "conversations_per_s": conversations / seconds["ours"],
            "speed_ratio": seconds["plain"] / seconds["ours"],
            "speed_ratio_batched": seconds["batched"] / seconds["ours"],
            "peak_gib": peak["ours"] / 2**30,
            "memory_ratio": peak["plain"] / peak["ours"],
            "slots_used": float(runs["ours"][0].printed.split()[1]),
        }
    ]
