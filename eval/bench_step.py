"""Times training steps of a drafter on given features, in this process: what eval/bench.py training-step starts, one at a time.

    python eval/bench_step.py ours inputs.pt

It prints one line of JSON: seconds of each step, its loss, the most memory this process held, and the floor: the time that the
step's matrix products take here, each alone.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from recipes.cpu import keep_freed_memory  # before torch

# isort: split
import torch
from torch import Tensor, nn

from data.batch import Batch
from data.target import TargetConfig
from data.target_head import TargetHead, head_logits
from data.target_model import load_target
from data.teacher import OnlineTeacher
from drafters import block, dflash, dspark, eagle3
from drafters.attention import slot_stretches
from drafters.block import BlockDrafter
from drafters.dflash import DFlashConfig, DFlashDrafter
from drafters.drafter import Drafter, FrozenTarget
from drafters.dspark import DSparkConfig, DSparkDrafter
from drafters.eagle3 import Eagle3Config, Eagle3Drafter
from drafters.layers import DrafterShape
from drafters.losses import chunk_rows
from eval.plain import attend, head_loss
from recipes.provenance import peak_memory

AUX_LAYERS = (2, 15, 27)


def build(settings: dict[str, Any], shape: DrafterShape, target: FrozenTarget) -> Drafter:
    """The drafter of a case, its head the target's rows, frozen, as the other project has it."""
    kept_W = torch.arange(settings["words"])
    torch.manual_seed(0)
    reduced = settings["words"] if settings["words"] < shape.vocab_size else None
    blocks: dict[str, Any] = {"num_layers": 1, "block_size": 8, "num_anchors": 128, "aux_layers": AUX_LAYERS, "mask_token_id": 0}
    drafter: Drafter
    if settings["method"] == "eagle3":
        residual = settings.get("norm_before_residual", True)
        config = Eagle3Config(AUX_LAYERS, reduced, num_steps=settings["steps"], step_decay=1.0, norm_before_residual=residual)
        drafter = Eagle3Drafter(shape, config, kept_W=kept_W, target=target)
    elif settings["method"] == "dflash":
        drafter = DFlashDrafter(shape, DFlashConfig(**blocks, draft_vocab_size=reduced, gamma=4.0), kept_W=kept_W, target=target)
    else:
        drafter = DSparkDrafter(shape, DSparkConfig(**blocks, draft_vocab_size=reduced), kept_W=kept_W, target=target)
    head = getattr(drafter, "lm_head", None)
    if head is not None:
        assert isinstance(head, nn.Linear)
        head.weight.data.copy_(target.head.weight_VD[: settings["words"]])
        head.weight.requires_grad_(False)
    return drafter


def products(drafter: Drafter, batch: Batch) -> Counter[tuple[int, int, int]]:
    """The matrix products (m, n, k) of a training step, and how many of each: by formula, over labelled rows."""
    found: Counter[tuple[int, int, int]] = Counter()

    def linear(rows: int, weight: Tensor, *, times: int = 1, back_to_input: bool = True) -> None:
        out, inside = weight.shape
        found[rows, out, inside] += times
        found[rows, inside, out] += times * back_to_input
        found[out, inside, rows] += times * weight.requires_grad

    T = batch.text.tokens_BT.numel()
    labels: Any = drafter.labels(batch)  # type: ignore[operator]
    W, D = len(drafter.kept_W), batch.last_hidden_BTD.shape[-1]
    linear(T, drafter.fc.weight, back_to_input=False)  # type: ignore[arg-type, union-attr]
    if isinstance(drafter, Eagle3Drafter):
        M, K, R = len(labels.places.row_M), drafter.config.num_steps, len(labels.slot_R)
        attention, mlp = drafter.midlayer.self_attn, drafter.midlayer.mlp
        for rows, times in ((T, 1), (M, K - 1)):
            linear(rows, attention.k_proj.weight, times=times)
            linear(rows, attention.v_proj.weight, times=times)
        of_queries, times, judged = M, K, M
        head = drafter.lm_head.weight
    else:
        assert isinstance(drafter, BlockDrafter)
        layer = drafter.layers[0]
        attention, mlp = layer.self_attn, layer.mlp  # type: ignore[assignment]
        R, times = len(labels.draft_R), 1
        of_queries = len(labels.anchors.row_M) * drafter.backbone.block_size
        for rows in (T, of_queries):
            linear(rows, attention.k_proj.weight)
            linear(rows, attention.v_proj.weight)
        judged = len(labels.state_R.unique()) if isinstance(drafter, DSparkDrafter) else 0
        head = drafter.head_weight()
        if isinstance(drafter, DSparkDrafter):
            linear(R, drafter.markov_head.markov_w2.weight)
    for weight in (
        attention.q_proj.weight,
        attention.o_proj.weight,
        mlp.gate_proj.weight,
        mlp.up_proj.weight,
        mlp.down_proj.weight,
    ):
        linear(of_queries, weight, times=times)
    linear(R, head)
    found[judged, W, D] += judged > 0
    return +found


def attention_flops(drafter: Drafter, batch: Batch) -> int:
    """Of scores and weighted values over what is seen, forward, and two and a half times that backward, as flash does it."""
    if not isinstance(drafter, Eagle3Drafter):
        return 0  # a few percent, and which of the keys at a block's edge count is the mask's to say
    labels, seen = drafter.labels(batch), 0
    for _, first, stop, low, high, causal in slot_stretches(batch.text.document_ids_BT, labels.places):
        count = stop - first
        seen += count * (count + 1) // 2 if causal else count * (high - low)
    steps = drafter.config.num_steps
    seen = steps * seen + len(labels.places.row_M) * steps * (steps - 1) // 2
    attention = drafter.midlayer.self_attn
    return int(3.5 * 4 * seen * attention.num_heads * attention.head_dim)


def floor_seconds(shapes: Counter[tuple[int, int, int]], words: int) -> float:
    """The time that these products take alone: in one piece or in head_logits()'s blocks, whichever is faster here; those of the
    vocabulary in chunks of rows, as head_loss() takes them."""
    total = 0.0
    for (m, n, k), times in shapes.items():
        rows = k if m == words else m
        chunks = max(1.0, rows / chunk_rows(words, "cpu")) if words in (m, n, k) else 1.0
        few = round(rows / chunks)
        one, other = (torch.randn(m, few), torch.randn(n, few)) if m == words else (torch.randn(few, k), torch.randn(n, k))
        room = torch.zeros(len(one), n)
        ways = (partial(torch.mm, one, other.T, out=room), partial(head_logits, [(one, other)], room))
        total += min(map(_timed, ways)) * chunks * times
    return total


def _timed(work: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Trained:
    """A drafter in training, as a file of inputs has it."""

    def __init__(self, path: Path) -> None:
        self.given = torch.load(path, weights_only=False)
        settings = self.given["settings"]
        target = FrozenTarget(self.given["embedding"], TargetHead(self.given["head"], None, 1.0, None))
        self.drafter = build(settings, self.given["shape"], target)
        self.drafter.load_state_dict(self.given["weights"])
        self.parameters = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)
        self.teacher = None
        if settings.get("online"):
            model = load_target(Path(self.given["target"]), TargetConfig("", dtype="float32"), torch.device("cpu"))
            self.teacher = OnlineTeacher(model, AUX_LAYERS)
        self.shapes = products(self.drafter, self.given["batch"])
        self.flops = sum(2 * m * n * k * times for (m, n, k), times in self.shapes.items())
        self.flops += attention_flops(self.drafter, self.given["batch"])

    def step(self) -> float:
        """One step, and its loss."""
        batch = self.given["batch"]
        if self.teacher is not None:
            batch = self.teacher.batch([self.given["documents"]], [0])
        weight = self.drafter.loss_weight(batch)  # as the loop asks before
        loss = self.drafter(batch).loss_sum / weight
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def wait_for_turn(in_turn: bool) -> None:
    """Until another process has taken a step, which eval/bench.py says with a line; where they take any in turn. Ends this one if
    that has ended."""
    if in_turn and not sys.stdin.readline():
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("implementation", choices=["ours", "reference"])
    parser.add_argument("inputs", type=Path, nargs="+", help="what eval/bench.py wrote; of several, steps are taken in turn")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--in-turn", action="store_true", help="take a step for each line of the input, and say that it is taken")
    arguments = parser.parse_args()
    keep_freed_memory()
    if arguments.implementation == "reference":
        for module in (eagle3, block):
            module.attend = attend  # type: ignore[attr-defined]
        for module in (eagle3, dflash, dspark):
            module.head_loss = head_loss  # type: ignore[attr-defined]
    runs = [Trained(path) for path in arguments.inputs]
    found: list[dict[str, Any]] = [{"seconds": [], "losses": [], "floor_seconds": [], "flops": run.flops} for run in runs]
    for _ in range(arguments.steps + 1):
        wait_for_turn(arguments.in_turn)
        for run, result in zip(runs, found, strict=True):
            start = time.perf_counter()
            result["losses"].append(run.step())
            result["seconds"].append(time.perf_counter() - start)
        if arguments.in_turn:
            print("taken", flush=True)
    wait_for_turn(arguments.in_turn)
    peak_bytes = peak_memory(torch.device("cpu"))
    for run, result in zip(runs, found, strict=True):
        # Beside a step each, for a machine's speed changes within a minute.
        for _ in range(min(arguments.steps, 3) + 1):
            start = time.perf_counter()
            run.step()
            result["seconds_again"] = [*result.get("seconds_again", []), time.perf_counter() - start]
            result["floor_seconds"].append(floor_seconds(run.shapes, len(run.drafter.kept_W)))
        del result["floor_seconds"][0], result["seconds_again"][0], result["seconds"][0]
        result["peak_bytes"] = peak_bytes
        square = partial(torch.mm, torch.randn(2048, 2048), torch.randn(2048, 2048))
        result["matmul_peak"] = 2 * 2048**3 / min(_timed(square) for _ in range(5))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
