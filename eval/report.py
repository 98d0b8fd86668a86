"""What was measured, as report.json for programs, report.md for people, and report.png for those who would rather look."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from drafters.acceptance import Acceptance
from drafters.saved import Saved
from eval.serve import Counters


class Measurement(NamedTuple):
    """One pass over some prompts. answers: token ids in prompt order; counters: vLLM's, of this pass only."""

    seconds: float
    answers: list[list[int]]
    counters: Counters

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / self.seconds

    @property
    def ms_per_token(self) -> float:
        """Time per output token after the first, by vLLM's own clock."""
        return 1000 * self.counters.decode_seconds / max(self.counters.decode_tokens, 1)


Measurements = dict[tuple[int, int], list[Measurement]]
"""Passes by (drafts per target pass, concurrency); 0 drafts: the target alone. Entry i of each list is of repeat i."""


def summarise(saved: Saved, measured: Measurements, offline: dict[int, Acceptance]) -> dict[str, Any]:
    """report.json but for its provenance.

    runs: a row per method, number of drafts and concurrency. speedup: tokens per second over those of the target alone in the
    same repeat, prompts' processing included. offline: PyTorch's prediction beside vLLM's count, on the same answers.
    """
    rows = []
    for (k, concurrency), passes in measured.items():
        alone = measured[0, concurrency]
        ratios = [one.tokens_per_s / base.tokens_per_s for one, base in zip(passes, alone, strict=True)]
        pairs = [pair for one, base in zip(passes, alone, strict=True) for pair in zip(one.answers, base.answers, strict=True)]
        served = pooled(passes)
        rows.append(
            {
                "method": saved.description.method if k else "none",
                "num_speculative_tokens": k,
                "concurrency": concurrency,
                "num_prompts": len(passes[0].answers),
                "tokens_per_s": spread([one.tokens_per_s for one in passes]),
                "ms_per_token": spread([one.ms_per_token for one in passes]),
                "acceptance_length": served.length if k else None,
                "per_position": list(served.per_position) if k else None,
                "speedup": spread(ratios),
                "greedy_identical_share": sum(a == b for a, b in pairs) / len(pairs),
            }
        )
    most = max(concurrency for _, concurrency in measured)
    comparison = [
        {
            "num_speculative_tokens": k,
            "acceptance_length": predicted.length,
            "per_position": list(predicted.per_position),
            "served_acceptance_length": pooled(measured[k, most]).length,
            "served_per_position": list(pooled(measured[k, most]).per_position),
        }
        for k, predicted in offline.items()
    ]
    return {
        "method": saved.description.method,
        "title": saved.description.title,
        "target": saved.description.target_model,
        "step": saved.step,
        "runs": rows,
        "offline": comparison,
    }


def pooled(passes: Sequence[Measurement]) -> Acceptance:
    """vLLM's counts over several passes."""
    total = Acceptance(0, (0,) * len(passes[0].counters.accepted))
    for one in passes:
        total += Acceptance(one.counters.num_drafts, one.counters.accepted)
    return total


def spread(values: Sequence[float]) -> dict[str, float]:
    """{median, low, high} of repeats."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def read_report(folder: Path) -> dict[str, Any] | None:
    """report.json of a report folder, if there is one."""
    path = folder / "report.json"
    return json.loads(path.read_text()) if path.is_file() else None


def write_report(folder: Path, report: dict[str, Any], *, metrics: Path) -> None:
    """Writes report.png, report.md, and at last report.json, which says that all three are there."""
    plot(folder / "report.png", report, metrics)
    (folder / "report.md").write_text(markdown(report))
    (folder / "report.json").write_text(json.dumps(report, indent=1))


def add_to_card(card: Path, report: dict[str, Any]) -> None:
    """Puts what serving gave at the end of a model card, in place of what stood there from an earlier report."""
    before, _, _ = card.read_text(encoding="utf-8").partition("## Served")
    rows = [row for row in report["runs"] if row["num_speculative_tokens"]]
    lines = [
        "## Served",
        "",
        f"Measured in vLLM on test prompts ({report['environment']['machine']}):",
        "",
        "| drafts | concurrency | acceptance length | speedup |",
        "|---|---|---|---|",
    ]
    for row in rows:
        drafts, concurrency, length = row["num_speculative_tokens"], row["concurrency"], row["acceptance_length"]
        speedup = "not timed" if report["interpreted"] else f"{row['speedup']['median']:.2f}"
        lines.append(f"| {drafts} | {concurrency} | {length:.3f} | {speedup} |")
    card.write_text(before + "\n".join(lines) + "\n", encoding="utf-8")


def best_row(report: dict[str, Any], concurrency: int) -> dict[str, Any]:
    """The row of the fastest number of drafts at a concurrency; where times mean nothing, of the greatest acceptance length."""
    rows = [row for row in report["runs"] if row["concurrency"] == concurrency and row["num_speculative_tokens"]]
    return max(rows, key=lambda row: float(row["acceptance_length"] if report["interpreted"] else row["speedup"]["median"]))


def markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    lowest, highest = (pick(row["concurrency"] for row in report["runs"]) for pick in (min, max))
    best = best_row(report, lowest)
    k = best["num_speculative_tokens"]
    identical = min(row["greedy_identical_share"] for row in report["runs"])
    gain = (
        f"vLLM answers **{best['speedup']['median']:.2f}x** as fast ({best['speedup']['low']:.2f} to {best['speedup']['high']:.2f})"
    )
    if highest > lowest:
        busy = best_row(report, highest)
        gain += f", at concurrency {highest} {busy['speedup']['median']:.2f}x with {busy['num_speculative_tokens']} drafts"
    if report["interpreted"]:
        rows = [row for row in report["modelled"] if (row["num_speculative_tokens"], row["concurrency"]) == (k, lowest)]
        guess = [f"; a model of the costs says ~{row['speedup']:.2f}x" for row in rows]
        gain = (
            f"vLLM gets **{best['acceptance_length']:.2f} tokens** out of a target pass (its kernels were interpreted here, so "
            f"its times say nothing{''.join(guess)})"
        )
    return "\n".join(
        [
            f"# {report['title']}",
            "",
            f"At concurrency {lowest}, with {k} drafts per target pass, {gain}; {identical:.0%} of the greedy answers are the "
            "same, token for token, as without a drafter.",
            "",
            "![curves](report.png)",
            "",
            *served_lines(report),
            *predicted_lines(report),
            *modelled_lines(report),
            *confidence_lines(report),
            *how_lines(report),
        ]
    )


def served_lines(report: dict[str, Any]) -> list[str]:
    """What vLLM did."""
    lines = [
        "## Served by vLLM",
        "",
        "| drafts | concurrency | prompts | tokens/s | ms per token | acceptance length | accepted per position | speedup | same |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    timed = not report["interpreted"]
    for row in report["runs"]:
        drafted = row["num_speculative_tokens"] > 0
        speedup = f"{row['speedup']['median']:.2f} ({row['speedup']['low']:.2f} to {row['speedup']['high']:.2f})"
        cells = [
            str(row["num_speculative_tokens"]) if drafted else "none",
            str(row["concurrency"]),
            str(row["num_prompts"]),
            f"{row['tokens_per_s']['median']:.1f}" if timed else "",
            f"{row['ms_per_token']['median']:.1f}" if timed else "",
            f"{row['acceptance_length']:.3f}" if drafted else "",
            " ".join(f"{share:.2f}" for share in row["per_position"]) if drafted else "",
            speedup if drafted and timed else "",
            f"{row['greedy_identical_share']:.0%}" if drafted else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "Tokens/s, with reading the prompts; ms per token, without, by vLLM's clock: medians of the repeats. Speedup: tokens/s "
        "over those of the target alone in the same repeat; median (lowest to highest), so not the quotient of the medians. "
        "Acceptance length: tokens per target pass, the target's own included. Accepted per position: share of the passes in which "
        "all drafts up to there were accepted. Both by vLLM's counters.",
        f"Of the 8-grams in these answers, {report['repeated_8_grams']:.1%} occurred before in the same answer.",
        "",
    ]


def predicted_lines(report: dict[str, Any]) -> list[str]:
    """What PyTorch says of the same answers."""
    lines = [
        "## Predicted by PyTorch",
        "",
        "| drafts | predicted acceptance length | served | predicted above served |",
        "|---|---|---|---|",
    ]
    for row in report["offline"]:
        predicted, served = row["acceptance_length"], row["served_acceptance_length"]
        lines.append(f"| {row['num_speculative_tokens']} | {predicted:.3f} | {served:.3f} | {predicted / served - 1:+.2%} |")
    return [*lines, ""]


def modelled_table(rows: list[dict[str, Any]]) -> list[str]:
    """A markdown table of eval/cost.py's rows."""
    lines = [
        "| drafts | concurrency | acceptance length | target, 1 token, ms | target, all drafts | block | heads | speedup |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = [f"{row[name]:.1f}" for name in ("alone_ms", "verify_ms", "block_ms", "heads_ms")]
        cells = [str(row["num_speculative_tokens"]), str(row["concurrency"]), f"{row['acceptance_length']:.3f}", *times]
        lines.append(f"| {' | '.join(cells)} | ~{row['speedup']:.2f} |")
    return lines


def modelled_lines(report: dict[str, Any]) -> list[str]:
    """What a model of costs says; nothing where vLLM's own times do."""
    if not report.get("modelled"):
        return []
    return [
        "## Modelled",
        "",
        *modelled_table(report["modelled"]),
        "",
        "Times of PyTorch's passes here, medians; speedup: acceptance length x target's pass over 1 token / (its pass over all "
        "drafts and one more + block + heads). A model, not a measurement: vLLM's own times mean nothing here.",
        "",
    ]


def confidence_lines(report: dict[str, Any]) -> list[str]:
    """How far the drafter's own confidence can be trusted; nothing where it has none."""
    found = report.get("confidence")
    if not found:
        return []
    lines = [
        "## Confidence",
        "",
        "| | calibration error | area under the curve |",
        "|---|---|---|",
    ]
    names = {
        "raw": "as trained",
        "exported": "as exported: one scaling of all drafts",
        "scaled": "a scaling of each draft of a block",
    }
    for key, name in names.items():
        lines.append(f"| {name} | {found[key]['calibration_error']:.1%} | {found[key]['area_under_curve']:.3f} |")
    return [
        *lines,
        "",
        f"Of {found['num_drafts']} drafts on held-out answers, all whose predecessors in the block were accepted; "
        f"{found['accepted_share']:.1%} were, too. Scaled on the validation answers. Expected calibration error over 15 bins.",
        "",
        "![reliability](confidence.png)",
        "",
    ]


def how_lines(report: dict[str, Any]) -> list[str]:
    """With what it was measured."""
    environment = report["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    versions += "".join(f", vLLM plugin {name}" for name in environment["vllm_plugins"])
    export = report["made_from"]["export"]
    return [
        "## How",
        "",
        f"Checkpoint of step {report['step']}, {export['dtype']}; {versions}; {environment['machine']}"
        f"{''.join(f', {device}' for device in environment['devices'])}; commit {str(environment['commit'])[:7]}.",
        f"Settings: {', '.join(f'{name} {value}' for name, value in report['made_from']['settings'].items() if value)}; "
        "every repeat asks other prompts, the same of every server.",
        "",
    ]


def plot(path: Path, report: dict[str, Any], metrics: Path) -> None:
    """Three panels: training curves, acceptance per position, speedup by number of drafts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (training, positions, speedups) = pyplot.subplots(1, 3, figsize=(15, 4.6))
    figure.set_layout_engine("constrained", wspace=0.08)
    figure.suptitle(report["title"])
    logged = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [(row["step"], row["loss"]) for row in logged if "loss" in row]
    validated = [(row["step"], row["validation/acceptance_length"]) for row in logged if "validation/acceptance_length" in row]
    training.plot(*zip(*losses, strict=True), color="tab:blue")
    training.set(title="training", xlabel="step", ylim=(0, None))
    training.set_ylabel("loss", color="tab:blue")
    other = training.twinx()
    other.plot(*zip(*validated, strict=True), color="tab:orange", marker="o", markersize=3)
    other.set_ylabel("acceptance length, held out", color="tab:orange")

    longest = max(report["offline"], key=lambda row: int(row["num_speculative_tokens"]))
    places = range(1, len(longest["per_position"]) + 1)
    positions.plot(places, longest["per_position"], marker="o", markersize=9, markerfacecolor="none", label="PyTorch")
    positions.plot(places, longest["served_per_position"], marker="x", linestyle="--", label="vLLM")
    title = f"accepted, of {longest['num_speculative_tokens']} drafts"
    positions.set(title=title, xlabel="position", ylabel="share of passes", ylim=(0, 1), xticks=list(places))
    positions.legend()

    for concurrency in sorted({row["concurrency"] for row in report["runs"]}):
        rows = [row for row in report["runs"] if row["concurrency"] == concurrency and row["num_speculative_tokens"]]
        medians = [row["speedup"]["median"] for row in rows]
        reach = [
            [row["speedup"]["median"] - row["speedup"]["low"] for row in rows],
            [row["speedup"]["high"] - row["speedup"]["median"] for row in rows],
        ]
        drafts = [row["num_speculative_tokens"] for row in rows]
        speedups.errorbar(drafts, medians, yerr=reach, marker="o", capsize=3, label=f"concurrency {concurrency}")
    speedups.axhline(1.0, color="gray", linewidth=0.8, label="target alone")
    title = "speedup, interpreted: says nothing" if report["interpreted"] else "speedup in vLLM"
    speedups.set(title=title, xlabel="drafts per target pass", ylabel="times the target alone, lowest to highest")
    speedups.xaxis.get_major_locator().set_params(integer=True)
    speedups.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
