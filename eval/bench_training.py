"""The benchmarks of training of eval/bench.py."""

import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from data.batch import Document
from data.packing import pack
from data.target import TargetConfig, resolve_target
from data.target_head import TargetHead
from data.target_model import load_target
from data.teacher import OnlineTeacher
from drafters.block import BlockDrafter
from drafters.drafter import FrozenTarget
from drafters.layers import DrafterShape
from eval.bench_step import AUX_LAYERS, build
from eval.bench_turns import compare, run_worker
from recipes.load import RecipeError
from recipes.progress import progress_bar

HERE = Path(__file__).parent
SPECULATORS = Path.home() / ".cache" / "pacesetter" / "speculators-0.9.0"
SPECFORGE = SPECULATORS.with_name("specforge-0.2.0")
REQUIREMENTS = [
    *("transformers>=4.56.1,<5.16", "datasets<=5.0.1", "loguru<=0.7.3", "numpy<=2.4.6", "tqdm<=4.70.0"),
    *("httpx", "openai>=2", "pydantic-settings", "typer", "accelerate", "psutil"),
]
NUM_DOCUMENTS, LENGTH = 4, 512


def training_step(
    cases: dict[str, dict[str, Any]], *, against: str, target: str, supervised: float, repeats: int
) -> Iterator[dict[str, Any]]:
    """See eval/bench.py. cases: what is trained, by name."""
    with tempfile.TemporaryDirectory() as name:
        inputs, others_inputs = Path(name) / "inputs.pt", Path(name) / "theirs.pt"
        worker = others_worker(against, inputs, others_inputs)
        given = features(target, supervised)
        for case, settings in cases.items():
            if against == "specforge":
                settings = {**settings, "norm_before_residual": False}  # the layer that it has
            mine, others = case_inputs(settings, given)
            torch.save(mine, inputs)
            torch.save(others, others_inputs)
            ours = [sys.executable, str(HERE / "bench_step.py"), "ours", str(inputs)]
            found = compare(ours, worker, repeats=repeats, steps=settings.get("timed", 4), name=case)
            check_same_work(*found.pop("first_losses"), factor=loss_factor(settings) if against == "speculators" else 1.0)
            yield {"case": case, "against": against, "tokens_per_s": NUM_DOCUMENTS * LENGTH / found.pop("seconds"), **found}


def others_worker(against: str, inputs: Path, others_inputs: Path) -> list[str]:
    """The command that takes the other side's steps."""
    if against == "speculators":
        return [speculators_python(), str(HERE / "bench_speculators.py"), str(others_inputs)]
    if against == "specforge":
        return ["env", f"PYTHONPATH={specforge_path()}", sys.executable, str(HERE / "bench_specforge.py"), str(others_inputs)]
    return [sys.executable, str(HERE / "bench_step.py"), "reference", str(inputs)]


def loss_factor(settings: dict[str, Any]) -> float:
    """By how much speculators' loss of the same work is larger: it is a sum over EAGLE-3's steps of each one's mean, or a block's
    weighted sum over its number of labels, where ours is over the sum of the weights."""
    if settings["method"] == "eagle3":
        return float(settings["steps"])
    size, gamma = 8, 4.0
    weights = [math.exp(-k / gamma) for k in range(size - (settings["method"] == "dflash"))]
    return sum(weights) / len(weights)


def check_same_work(ours: float, theirs: float, *, factor: float) -> None:
    """RecipeError unless the first losses, of the same weights, agree."""
    if abs(ours * factor / theirs - 1) > 0.02:
        raise RecipeError(f"the first loss is {ours * factor:.4f} here and {theirs:.4f} there: that is not the same work")


def features(target: str, supervised: float) -> dict[str, Any]:
    """The target's features of four packed documents of random tokens, whose supervised ones are then what it finds most likely;
    its input embedding and head; and what goes into its last norm."""
    folder = resolve_target(TargetConfig(target))
    model = load_target(folder, TargetConfig(target, dtype="float32"), torch.device("cpu"))
    teacher = OnlineTeacher(model, AUX_LAYERS)
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    torch.manual_seed(0)
    mask_T = torch.arange(LENGTH) >= round((1 - supervised) * LENGTH)
    documents = [Document(str(i), torch.randint(model.config.vocab_size, (LENGTH,)), mask_T) for i in range(NUM_DOCUMENTS)]
    batch = teacher.batch([documents], [0])
    text, likely_BT = batch.text, batch.argmax_BT.roll(1, dims=1)
    tokens_BT = torch.where(text.loss_mask_BT & (likely_BT >= 0), likely_BT, text.tokens_BT)
    frozen = FrozenTarget.of(model)
    return {
        "target": str(folder),
        "shape": DrafterShape.of(model.config),
        "batch": batch._replace(text=replace(text, tokens_BT=tokens_BT)),
        "embedding": frozen.embedding_VH.clone(),
        "head": frozen.head.weight_VD.clone(),
        "before_norm": torch.cat(before_norm).reshape(1, NUM_DOCUMENTS * LENGTH, -1),
    }


def case_inputs(settings: dict[str, Any], given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both workers read: labels that the draft vocabulary has; weights; and the same as the other project names it."""
    batch, words, text = given["batch"], settings["words"], given["batch"].text
    # Of the whole vocabulary's most likely tokens those beyond the draft vocabulary become others: no row is left out.
    tokens_BT = torch.where(text.loss_mask_BT, text.tokens_BT % words, text.tokens_BT)
    argmax_BT = torch.where(batch.argmax_BT >= 0, batch.argmax_BT % words, -1)
    batch = batch._replace(text=replace(text, tokens_BT=tokens_BT), argmax_BT=argmax_BT)
    drafter = build(settings, given["shape"], FrozenTarget(given["embedding"], TargetHead(given["head"], None, 1.0, None)))
    last, mask_BT = given["before_norm"], text.loss_mask_BT
    theirs = {
        "hidden_states": batch.aux_hidden_BTAD.flatten(2),
        "input_ids": tokens_BT,
        "document_ids": text.document_ids_BT,
        "position_ids": text.positions_BT,
        "loss_mask": mask_BT,
        "verifier_last_hidden_states": last,
    }
    anchors = None
    if isinstance(drafter, BlockDrafter):
        anchors = drafter.labels(batch).anchors.index_M
        assert int(anchors.max()) + 8 <= tokens_BT.numel(), "theirs has no block that ends behind the row"
    else:  # it reads the token after each state, and its mask is that of what is predicted
        theirs |= {"input_ids": tokens_BT.roll(-1, 1), "verifier_last_hidden_states": last.roll(-1, 1)}
        theirs["loss_mask"] = mask_BT & mask_BT.roll(-1, 1) & mask_BT.roll(-2, 1)
    common = {"settings": settings, "weights": drafter.state_dict()}
    mask_T = text.loss_mask_BT[0, :LENGTH]
    each = tokens_BT.view(NUM_DOCUMENTS, LENGTH)
    documents = [Document(str(i), tokens_T, mask_T, greedy=True) for i, tokens_T in enumerate(each)]
    others = {"target": given["target"], "inputs": theirs, "anchors": anchors, "documents": each, **common}
    others |= {"head": given["head"], "embedding": given["embedding"], "after_norm": batch.last_hidden_BTD.roll(-1, 1)}
    return {**given, "batch": batch, "documents": documents, **common}, others


def specforge_path() -> str:
    """The folder of the package specforge alone, which is fetched at first: our own environment has the rest."""
    if not SPECFORGE.is_dir():
        print(f"fetching specforge 0.2.0 into {SPECFORGE}", file=sys.stderr)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(SPECFORGE), "specforge==0.2.0"]
        subprocess.run(install, check=True)
    return str(SPECFORGE)


def speculators_python() -> str:
    """The interpreter of an environment with speculators, which is made at first."""
    python = SPECULATORS / "bin" / "python"
    if not (SPECULATORS / "ready").exists():
        print(f"making {SPECULATORS} for speculators 0.9.0: some minutes, 2 GB", file=sys.stderr)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([sys.executable, "-m", "venv", str(SPECULATORS)], check=True)
        subprocess.run([*install, f"torch=={torch.__version__}"], check=True)
        subprocess.run([*install, *REQUIREMENTS], check=True)
        subprocess.run([*install, "--no-deps", "speculators==0.9.0", "hs-connectors==0.9.0"], check=True)
        (SPECULATORS / "ready").touch()
    return str(python)


def ttt(*, target: str, supervised: float, repeats: int) -> Iterator[dict[str, Any]]:
    """See eval/bench.py."""
    given, steps = features(target, supervised), (2, 4, 7)
    worker = [sys.executable, str(HERE / "bench_step.py"), "ours"]
    with tempfile.TemporaryDirectory() as name:
        paths = [f"{name}/{number}.pt" for number in steps]
        for number, path in zip(steps, paths, strict=True):
            torch.save(case_inputs({"method": "eagle3", "words": 8192, "steps": number}, given)[0], path)
        # Steps of 2 and of 7 in turn in one process: a machine's speed changes within a minute.
        few, many = run_worker([*worker, paths[0], paths[-1], "--steps", str(4 * repeats)])
        peak = [run_worker([*worker, path, "--steps", "1"])[0]["peak_bytes"] / 2**20 for path in progress_bar(paths, "memory")]
    time_ratio = median(b / a for a, b in zip(few["seconds"], many["seconds"], strict=True))
    flop_ratio = many["flops"] / few["flops"]
    yield {
        "case": "eagle3-ttt",
        "time_ratio": time_ratio,
        "flop_ratio": flop_ratio,
        "time_over_flop_ratio": time_ratio / flop_ratio,
        "mib_per_step_2_to_4": (peak[1] - peak[0]) / 2,
        "mib_per_step_4_to_7": (peak[2] - peak[1]) / 3,
    }


def part(what: str, *, repeats: int) -> Iterator[dict[str, Any]]:
    """See eval/bench.py, attention and loss."""
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "plain": []}
    for kind in progress_bar(["ours", "plain"] * repeats, what):
        runs[kind] += run_worker([sys.executable, str(HERE / "bench_parts.py"), what, kind])
    seconds, peak = (
        {kind: median(run[name] for run in found) for kind, found in runs.items()} for name in ("seconds", "peak_bytes")
    )
    yield {
        "case": what,
        "speed_ratio": seconds["plain"] / seconds["ours"],
        "peak_mib": peak["ours"] / 2**20,
        "memory_ratio": peak["plain"] / peak["ours"],
    }


def packing() -> Iterator[dict[str, Any]]:
    """See eval/bench.py."""
    rng, row_tokens = random.Random(0), 4096
    lengths = [min(row_tokens, max(8, round(rng.lognormvariate(6.2, 0.9)))) for _ in range(200_000)]
    start = time.perf_counter()
    rows = pack(lengths, row_tokens=row_tokens, seed=0, epoch=0)
    seconds = time.perf_counter() - start
    shuffled = lengths.copy()
    rng.shuffle(shuffled)
    in_turn, room = 1, row_tokens
    for length in shuffled:
        in_turn, room = (in_turn, room - length) if length <= room else (in_turn + 1, row_tokens - length)
    eights = [shuffled[i : i + 8] for i in range(0, len(shuffled), 8)]
    yield {
        "case": "packing",
        "documents_per_s": len(lengths) / seconds,
        "slots_used": sum(lengths) / (len(rows) * row_tokens),
        "slots_used_in_turn": sum(lengths) / (in_turn * row_tokens),
        "slots_used_eight_padded": sum(lengths) / sum(len(eight) * max(eight) for eight in eights),
    }
