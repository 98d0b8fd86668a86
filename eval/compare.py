"""Puts measured drafters of one target side by side.

    python eval/compare.py runs/smollm2_cpu-eagle3 runs/smollm2_cpu-dflash runs/smollm2_cpu-dspark

Each must have been measured: python eval/speedup.py <run>/export. Where vLLM's kernels were interpreted (DSpark on a CPU), the
speedup is a model's, marked with a ~: the step of a measured DFlash drafter among them, and the heads' time, measured in PyTorch.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from drafters.dspark import DSparkDrafter
from drafters.saved import Saved, read_saved, rebuild
from eval.report import read_report
from recipes.load import RecipeError, run_script


class Measured(NamedTuple):
    """A run and its report."""

    saved: Saved
    report: dict[str, Any]

    def row(self, k: int, concurrency: int) -> dict[str, Any] | None:
        """The served row of k drafts (0: the target alone) at a concurrency, if it was measured."""
        rows = [r for r in self.report["runs"] if (r["num_speculative_tokens"], r["concurrency"]) == (k, concurrency)]
        return rows[0] if rows else None


def head_ms(drafter: DSparkDrafter, k: int, *, repeats: int = 50) -> float:
    """Milliseconds that DSpark's heads add to a step of k drafts for one request, as PyTorch runs them here."""
    hidden_H, tokens = torch.randn(1, drafter.fc.out_features), torch.tensor([3])
    found = []
    with torch.no_grad():
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(k):
                markov_M = drafter.markov_head.markov_w1(tokens)
                tokens = drafter.kept_W[drafter.markov_head.markov_w2(markov_M).argmax(-1)]
                drafter.confidence(hidden_H, markov_M)
            found.append(1000 * (time.perf_counter() - start))
    return median(found)


def modelled_speedup(dspark: Measured, dflash: Measured, k: int, *, concurrency: int) -> float | None:
    """Tokens of a step over its time, the target alone being 1: DFlash's step at k drafts, and the heads on top."""
    alone, block, row = dflash.row(0, concurrency), dflash.row(k, concurrency), dspark.row(k, max_concurrency(dspark))
    if alone is None or block is None or row is None:
        return None
    drafter = rebuild(dspark.saved, None)
    assert isinstance(drafter, DSparkDrafter)
    step_ms = block["ms_per_token"]["median"] * block["acceptance_length"] + head_ms(drafter, k)
    return float(row["acceptance_length"] * alone["ms_per_token"]["median"] / step_ms)


def max_concurrency(measured: Measured) -> int:
    return max(int(row["concurrency"]) for row in measured.report["runs"])


def table(all_measured: list[Measured]) -> str:
    """A markdown table, a row per method and number of drafts."""
    lines = [
        "| method | parameters | trained, tokens/s | drafts | offline | served | speedup, 1 at a time | 4 at a time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    dflash = next((m for m in all_measured if m.saved.description.method == "dflash"), None)
    for measured in all_measured:
        saved = measured.saved
        size = sum(weight.numel() for weight in saved.weights.values())
        logged = [json.loads(line) for line in (saved.folder / "metrics.jsonl").read_text().splitlines()]
        rate = median(row["tokens_per_s"] for row in logged if "tokens_per_s" in row)
        for offline in measured.report["offline"]:
            k = offline["num_speculative_tokens"]
            gains = []
            for concurrency in (1, 4):
                row = measured.row(k, concurrency)
                if measured.report["interpreted"]:
                    guess = None if dflash is None else modelled_speedup(measured, dflash, k, concurrency=concurrency)
                    gains.append("" if guess is None else f"~{guess:.2f}")
                else:
                    gains.append("" if row is None else f"{row['speedup']['median']:.2f}")
            cells = [saved.description.method, f"{size / 1e6:.1f} M", f"{rate:.0f}", str(k)]
            cells += [f"{offline['acceptance_length']:.3f}", f"{offline['served_acceptance_length']:.3f}", *gains]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders that have a report")
    arguments = parser.parse_args()
    found = []
    for run in arguments.runs:
        saved, report = read_saved(run), read_report(run / "report")
        if report is None:
            raise RecipeError(f"{run} has no report; make one with: python eval/speedup.py {run}/export")
        found.append(Measured(saved, report))
    print(table(found))


if __name__ == "__main__":
    run_script(main)
