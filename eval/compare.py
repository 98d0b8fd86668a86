"""Puts measured drafters of one target side by side.

    python eval/compare.py runs/smollm2_cpu-eagle3 runs/smollm2_cpu-dflash runs/smollm2_cpu-dspark

Each must have been measured: python eval/speedup.py <run>/export. Where vLLM's kernels were interpreted (DSpark on a CPU), the
speedup is a model's (eval/cost.py), marked with a ~.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from drafters.saved import Saved, read_saved
from eval.report import read_report
from recipes.load import RecipeError, run_script


class Measured(NamedTuple):
    """A run and its report."""

    saved: Saved
    report: dict[str, Any]

    def gain(self, k: int, concurrency: int) -> str:
        """The speedup of k drafts at a concurrency; empty where there is none."""
        interpreted = self.report["interpreted"]
        for row in self.report["modelled" if interpreted else "runs"]:
            if (row["num_speculative_tokens"], row["concurrency"]) == (k, concurrency):
                return f"~{row['speedup']:.2f}" if interpreted else f"{row['speedup']['median']:.2f}"
        return ""


def table(all_measured: list[Measured]) -> str:
    """A markdown table, a row per method and number of drafts."""
    lines = [
        "| method | parameters | trained, tokens/s | under sampling | drafts | offline | served | speedup, 1 at a time | 4 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for measured in all_measured:
        saved = measured.saved
        size = sum(weight.numel() for weight in saved.weights.values())
        logged = [json.loads(line) for line in (saved.folder / "metrics.jsonl").read_text().splitlines()]
        rate = median(row["tokens_per_s"] for row in logged if "tokens_per_s" in row)
        validated = {row["step"]: row["validation/expected_length"] for row in logged if "validation/expected_length" in row}
        for offline in measured.report["offline"]:
            k = offline["num_speculative_tokens"]
            gains = [measured.gain(k, concurrency) for concurrency in (1, 4)]
            cells = [saved.description.method, f"{size / 1e6:.1f} M", f"{rate:.0f}", f"{validated[saved.step]:.3f}", str(k)]
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
