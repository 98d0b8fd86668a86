"""Serves the target in vLLM without and with its drafter, and measures what the drafter gains.

    python eval/speedup.py runs/smollm2_cpu-eagle3/export

Asks for answers to the held-out prompts at several concurrencies, without and with drafts in turn, several times over, a
warm-up not counted. Writes report.json, report.md and report.png to runs/<name>/report/.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from data.conversations import DataConfig, repeated_share
from drafters.saved import Saved, read_saved
from eval.acceptance import held_out_answers, offline_acceptance
from eval.confidence import measure as measure_confidence
from eval.cost import modelled
from eval.report import Measurement, Measurements, add_to_card, best_row, read_report, summarise, write_report
from eval.serve import Server, serve
from recipes.load import RecipeError, build, count, run_script
from recipes.progress import progress_bar
from recipes.provenance import environment


def measure(server: Server, prompts: Sequence[list[int]], *, concurrency: int, max_tokens: int) -> Measurement:
    """Greedy answers to ``prompts``, ``concurrency`` requests at a time."""
    before, start = server.counters(), time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=max_tokens), prompts))
    return Measurement(time.monotonic() - start, answers, server.counters().since(before))


def read_export(export: Path) -> dict[str, Any]:
    """export.json of an exported folder; RecipeError when the folder is not one that vLLM can be pointed at."""
    path = export / "export.json"
    if (export / "export" / "export.json").is_file():
        raise RecipeError(f"{export} is a run folder; did you mean {export / 'export'}?")
    if not path.is_file() or not (export / "speculative_config.json").is_file():
        raise RecipeError(f"{export} is not a native export; make one with: python export/checkpoint.py runs/<name>-<method>")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


class Plan(NamedTuple):
    """What is measured. num_drafts: with a leading 0, for no drafter. prompts[r]: what every pass of repeat r asks, token ids."""

    num_drafts: list[int]
    concurrency: list[int]
    prompts: list[list[list[int]]]
    max_tokens: int


def serving(saved: Saved, export: Path, plan: Plan, k: int, *, logs: Path, more: str) -> AbstractContextManager[Server]:
    """A server of the target with k drafts per pass, or without a drafter for k = 0. Nothing is cached between requests."""
    longest = max(len(prompt) for prompts in plan.prompts for prompt in prompts)
    extra = ["--max-num-seqs", str(max(plan.concurrency)), "--no-enable-prefix-caching", *shlex.split(more)]
    if not torch.cuda.is_available():
        extra.append("--enforce-eager")
    speculative = {**json.loads((export / "speculative_config.json").read_text()), "num_speculative_tokens": k}
    return serve(
        saved.description.target,
        dtype=saved.description.target_dtype,
        max_length=longest + plan.max_tokens + max(plan.num_drafts) + 1,
        log=logs / (f"vllm-{k}-drafts.log" if k else "vllm-no-drafter.log"),
        speculative=speculative if k else None,
        extra=extra,
    )


def measure_all(open_server: Callable[[int], AbstractContextManager[Server]], plan: Plan, *, together: bool) -> Measurements:
    """Measurements by (drafts, concurrency), a list entry per repeat; the servers take turns within each repeat.

    together: all servers are in memory at once, one of them busy at a time; else each is started anew for its turn.
    """
    found: Measurements = defaultdict(list)
    passes = len(plan.prompts) * len(plan.num_drafts) * len(plan.concurrency)
    with ExitStack() as resident:

        def ready(server: Server) -> None:
            server.wait_until_ready()
            measure(server, plan.prompts[0][:2], concurrency=2, max_tokens=plan.max_tokens)  # a warm-up

        if together:
            print(f"starting {len(plan.num_drafts)} vLLM servers, some 30 seconds each", file=sys.stderr)
        servers = {k: resident.enter_context(open_server(k)) for k in plan.num_drafts} if together else {}
        # All of them before the first is measured: one that still starts would slow it.
        for server in servers.values():
            ready(server)
        bar = resident.enter_context(progress_bar(total=passes, desc="served passes", unit="pass"))

        def record(server: Server, k: int, concurrency: int, prompts: list[list[int]]) -> None:
            found[k, concurrency].append(measure(server, prompts, concurrency=concurrency, max_tokens=plan.max_tokens))
            bar.update()

        for repeat, prompts in enumerate(plan.prompts):
            # Every other repeat goes backwards, so that a machine that slows down or speeds up favours none.
            order = plan.num_drafts[:: -1 if repeat % 2 else 1]
            if together:
                for concurrency in plan.concurrency:
                    for k in order:
                        record(servers[k], k, concurrency, prompts)
                continue
            for k in order:
                with open_server(k) as server:
                    ready(server)
                    for concurrency in plan.concurrency:
                        record(server, k, concurrency, prompts)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="a folder that export/checkpoint.py wrote, in the native format")
    parser.add_argument(
        "--num-drafts", type=count, nargs="+", default=[3, 4, 5], help="drafts per target pass to try; default %(default)s"
    )
    parser.add_argument("--concurrency", type=count, nargs="+", default=[1, 4], help="requests at a time; default %(default)s")
    parser.add_argument("--prompts", type=count, default=12, help="prompts of a pass; default %(default)s")
    parser.add_argument(
        "--repeats", type=count, default=3, help="passes of each kind, each over other prompts; default %(default)s"
    )
    parser.add_argument("--one-at-a-time", action="store_true", help="one server in memory at a time, as on GPUs; slower")
    parser.add_argument("--vllm-args", default="", help="more arguments for every server, as one string")
    parser.add_argument("--again", action="store_true", help="measure even if a report of the same export and settings is there")
    arguments = parser.parse_args()
    settings = {name: value for name, value in vars(arguments).items() if name not in ("export", "again")}
    export = arguments.export.resolve()
    made_from = read_export(export)
    run = Path(made_from["run"])
    saved = read_saved(run)
    if saved.step != made_from["step"]:
        raise RecipeError(
            f"{arguments.export} holds step {made_from['step']}, but {run} has validated better at step {saved.step} since; "
            f"export it again: python export/checkpoint.py {run}"
        )
    # What is served is in the export's precision; so is what PyTorch predicts.
    served = {name: weight.to(getattr(torch, made_from["dtype"])).float() for name, weight in saved.weights.items()}
    saved = saved._replace(weights=served)
    report_folder = run / "report"
    key = {"export": made_from, "settings": settings}
    if not arguments.again and (there := read_report(report_folder)) and there["made_from"] == key:
        finish(report_folder, there)
        print("this export had been measured with these settings; --again measures it anew")
        return
    report_folder.mkdir(exist_ok=True)

    answers = held_out_answers(run)
    size = arguments.prompts
    if len(answers) < size:
        raise RecipeError(f"there are {len(answers)} held-out prompts, too few for passes of {size}; give fewer --prompts")
    # Every repeat asks other prompts, as far as they reach.
    chosen = [[answers[(r * size + i) % len(answers)][0] for i in range(size)] for r in range(arguments.repeats)]
    max_tokens = build(DataConfig, yaml.safe_load((run / "recipe.yaml").read_text())["data"], "data").answers.max_tokens
    num_drafts = [0, *sorted(set(arguments.num_drafts))]
    plan = Plan(num_drafts, sorted(set(arguments.concurrency)), chosen, max_tokens)
    together = not (torch.cuda.is_available() or arguments.one_at_a_time)

    def open_server(k: int) -> AbstractContextManager[Server]:
        return serving(saved, export, plan, k, logs=report_folder, more=arguments.vllm_args)

    measured = measure_all(open_server, plan, together=together)
    # The answers of the widest passes, one list per repeat: what PyTorch predicts is compared with vLLM's count on these.
    alone = measured[0, max(plan.concurrency)]
    truth = [pair for prompts, one in zip(chosen, alone, strict=True) for pair in zip(prompts, one.answers, strict=True)]
    offline = offline_acceptance(saved, truth, plan.num_drafts[1:])
    report = summarise(saved, measured, offline)
    # Triton's interpreter runs what a CPU has no compiler for: the counts hold, the times don't.
    report["interpreted"] = os.environ.get("TRITON_INTERPRET") == "1"
    if report["interpreted"]:
        lengths = {row["num_speculative_tokens"]: row["served_acceptance_length"] for row in report["offline"]}
        report["modelled"] = modelled(saved, lengths, sorted({1, *plan.concurrency}))
    report |= {"made_from": key, "environment": environment(), "repeated_8_grams": repeated_share([a for _, a in truth])}
    if saved.calibration:
        report["confidence"] = measure_confidence(saved, answers, report_folder)
    write_report(report_folder, report, metrics=run / "metrics.jsonl")
    add_to_card(export / "README.md", report)
    finish(report_folder, report)


def finish(folder: Path, report: dict[str, Any]) -> None:
    """Prints the report, where it lies, and how to serve what did best."""
    best = best_row(report, min(row["concurrency"] for row in report["runs"]))
    export = report["made_from"]["export"]
    print((folder / "report.md").read_text())
    print(f"report: {folder / 'report.md'} (and report.json, report.png)")
    if best["num_speculative_tokens"] != export["num_drafts"]:
        words = f"{export['run']} --num-speculative-tokens {best['num_speculative_tokens']}"
        print(f"next: python export/checkpoint.py {words}   # the export drafts {export['num_drafts']}, which is slower")


if __name__ == "__main__":
    run_script(main)
