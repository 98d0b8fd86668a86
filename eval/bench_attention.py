"""Memory and time of EAGLE-3's attention over one long document, forward and backward, in this process: what eval/bench.py
attention starts. Prints one line of JSON.

    python eval/bench_attention.py ours --tokens 8192
"""

import argparse
import json
import time

import recipes.threads  # noqa: F401  # before torch

# isort: split
import torch

from drafters.attention import attend, slot_stretches
from drafters.slots import Places
from eval.bench_step import most_memory
from eval.plain import attend as plain_attend

N, G, C, LATER_STEPS = 9, 3, 64, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("implementation", choices=["ours", "plain"])
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    T = arguments.tokens
    places = Places(torch.zeros(T, dtype=torch.int64), torch.arange(T))
    stretches = slot_stretches(torch.zeros(1, T, dtype=torch.int64), places)
    torch.manual_seed(0)
    query, key, value = (torch.randn(*shape, C, requires_grad=True) for shape in ((T, 1, N), (1, T, G), (1, T, G)))
    flat = [torch.randn(T, 1, G, C, requires_grad=True) for _ in range(2 * LATER_STEPS)]
    own = list(zip(flat[::2], flat[1::2], strict=True))
    way = attend if arguments.implementation == "ours" else plain_attend
    before = most_memory()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        attended = way(query, (key, value), stretches, own=own)
        attended.sum().backward()
        seconds.append(time.perf_counter() - start)
    peak_bytes = most_memory() - before
    print(json.dumps([{"seconds": min(seconds), "peak_bytes": peak_bytes}]))


if __name__ == "__main__":
    main()
