"""A model of what a block drafter gains, from passes timed in PyTorch: for where vLLM's own times say nothing.

    python eval/cost.py runs/smollm2_cpu-dspark --num-drafts 5 --concurrency 1 4

    speedup = acceptance length x pass over one token / (pass over k + 1 tokens + block + heads)

The target's passes are transformers', over a cache; the block and its heads are run as training runs them. What vLLM does besides
(scheduling, sampling) is in none of them. eval/speedup.py puts this into the report where vLLM's kernels were interpreted.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from data.batch import Batch, Text
from drafters.block import BlockDrafter
from drafters.saved import Saved, read_saved
from drafters.slots import Places
from eval.acceptance import load_trained
from eval.report import modelled_table, read_report
from recipes.load import RecipeError, count, run_script

CONTEXT = 128
"""Tokens that every request has behind it."""


class Costs(NamedTuple):
    """Milliseconds: the target's pass over one new token of every request, and over k + 1; a block's layers; its heads."""

    alone_ms: float
    verify_ms: float
    block_ms: float
    heads_ms: float

    def speedup(self, acceptance_length: float) -> float:
        """Of tokens per second, over the target alone."""
        return acceptance_length * self.alone_ms / (self.verify_ms + self.block_ms + self.heads_ms)


@torch.no_grad()
def measure_costs(model: PreTrainedModel, drafter: BlockDrafter, *, num_drafts: int, concurrency: int) -> Costs:
    """The costs of a step of that many drafts for that many requests at once, medians of twenty."""
    device = model.device
    cache = DynamicCache(config=model.config)
    model(torch.zeros(concurrency, CONTEXT, dtype=torch.int64, device=device), past_key_values=cache, use_cache=True)

    def target(tokens: int) -> None:
        if added := cache.get_seq_length() - CONTEXT:
            cache.crop(-added)
        model(torch.zeros(concurrency, tokens, dtype=torch.int64, device=device), past_key_values=cache, use_cache=True)

    # What a step adds to the context, at most, and behind it the anchor.
    tokens_BT = torch.zeros(concurrency, num_drafts + 2, dtype=torch.int64)
    hidden = (*tokens_BT.shape, len(drafter.backbone.aux_layers or ()), drafter.hidden_norm.weight.shape[0])
    features = torch.randn(hidden, device=device, dtype=model.dtype)
    positions_BT = torch.arange(num_drafts + 2).expand_as(tokens_BT)
    text = Text(tokens_BT, tokens_BT, positions_BT, torch.ones_like(tokens_BT, dtype=torch.bool), tokens_BT[:, 0])
    batch = Batch(text, features, features[:, :, 0], tokens_BT.to(device))
    row_M = torch.arange(concurrency)
    anchors = Places(row_M, torch.full_like(row_M, num_drafts + 1))
    num_queries = num_drafts + drafter.backbone.block_size - drafter.num_drafts
    block_ms = milliseconds(lambda: drafter.run_blocks(batch, anchors, num_queries=num_queries), device)
    whole_ms = milliseconds(lambda: drafter.greedy_drafts(batch, anchors, num_drafts=num_drafts), device)
    alone_ms, verify_ms = (milliseconds(lambda n=n: target(n), device) for n in (1, num_drafts + 1))  # type: ignore[misc]
    return Costs(alone_ms, verify_ms, block_ms, max(whole_ms - block_ms, 0.0))


def milliseconds(work: Callable[[], Any], device: torch.device, *, repeats: int = 20) -> float:
    """The median time of some work, two times more not counted."""
    found = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(1000 * (time.perf_counter() - start))
    return median(found[2:])


def modelled(saved: Saved, lengths: dict[int, float], concurrency: list[int]) -> list[dict[str, Any]]:
    """A row of costs and speedup for each number of drafts, whose acceptance lengths are given, at each concurrency; none of a
    drafter that is not a block's."""
    teacher, drafter = load_trained(saved)
    rows: list[dict[str, Any]] = []
    if not isinstance(drafter, BlockDrafter):
        return rows
    for k, length in lengths.items():
        for requests in concurrency:
            costs = measure_costs(teacher.model, drafter, num_drafts=k, concurrency=requests)
            row = {"num_speculative_tokens": k, "concurrency": requests, "acceptance_length": length}
            rows.append({**row, **costs._asdict(), "speedup": costs.speedup(length)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder of dflash or dspark that eval/speedup.py has measured")
    parser.add_argument("--num-drafts", type=count, nargs="+", help="of those in the report; default: all")
    parser.add_argument("--concurrency", type=count, nargs="+", default=[1, 4], help="default %(default)s")
    arguments = parser.parse_args()
    report = read_report(arguments.run / "report")
    if report is None:
        raise RecipeError(f"{arguments.run} has no report; make one with: python eval/speedup.py {arguments.run}/export")
    lengths = {row["num_speculative_tokens"]: row["served_acceptance_length"] for row in report["offline"]}
    chosen = {k: length for k, length in lengths.items() if k in (arguments.num_drafts or lengths)}
    saved = read_saved(arguments.run)
    rows = modelled(saved, chosen, arguments.concurrency)
    if not rows:
        raise RecipeError(f"{arguments.run} is of {saved.description.method}; the model is of block drafters, dflash and dspark")
    print("\n".join(modelled_table(rows)))


if __name__ == "__main__":
    run_script(main)
