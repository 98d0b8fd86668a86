"""Memory and time of one part of a training step, forward and backward, in this process: what eval/bench.py attention and loss
start. Prints one line of JSON.

    python eval/bench_parts.py attention ours
"""

import argparse
import json
import time
from collections.abc import Callable

import recipes.cpu  # noqa: F401  # before torch

# isort: split
import torch
from torch import Tensor

from data.target_head import TargetHead
from drafters.attention import attend, slot_stretches
from drafters.losses import LossWeights, TeacherRows, head_loss
from drafters.slots import Places
from eval.plain import attend as plain_attend
from eval.plain import head_loss as plain_head_loss
from recipes.provenance import peak_memory


def attention(*, ours: bool) -> Callable[[], Tensor]:
    """EAGLE-3's, of SmolLM2's heads: 8192 slots of one document, at their third step."""
    T, N, G, C = 8192, 9, 3, 64
    places = Places(torch.zeros(T, dtype=torch.int64), torch.arange(T))
    stretches = slot_stretches(torch.zeros(1, T, dtype=torch.int64), places)
    query, key, value = (torch.randn(*shape, C, requires_grad=True) for shape in ((T, 1, N), (1, T, G), (1, T, G)))
    flat = [torch.randn(T, 1, G, C, requires_grad=True) for _ in range(4)]
    own = list(zip(flat[::2], flat[1::2], strict=True))
    way = attend if ours else plain_attend
    return lambda: way(query, (key, value), stretches, own=own).sum()


def loss(*, ours: bool) -> Callable[[], Tensor]:
    """KL of 4096 rows to as many teacher rows over 49,152 words, with a head that learns."""
    rows, width, words = 4096, 576, 49152
    head = TargetHead(torch.randn(words, width), None, 1.0, None)
    read, own_head = torch.randn(rows, width, requires_grad=True), torch.randn(words, width).mul_(0.1).requires_grad_()
    teacher = TeacherRows(head, torch.randn(rows, width).mul_(0.1), torch.arange(rows))
    label_R, weight_R = torch.randint(words, (rows,)), torch.ones(rows)
    way = head_loss if ours else plain_head_loss
    return lambda: way([(read, own_head)], LossWeights(kl=1.0), weight_R=weight_R, label_R=label_R, teacher=teacher).loss_sum


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["attention", "loss"])
    parser.add_argument("implementation", choices=["ours", "plain"])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    part = (attention if arguments.part == "attention" else loss)(ours=arguments.implementation == "ours")
    before, seconds = peak_memory(torch.device("cpu")), []
    for _ in range(3):
        start = time.perf_counter()
        part().backward()
        seconds.append(time.perf_counter() - start)
    print(json.dumps([{"seconds": min(seconds), "peak_bytes": peak_memory(torch.device("cpu")) - before}]))


if __name__ == "__main__":
    main()
