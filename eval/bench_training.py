"""The benchmarks of training of eval/bench.py."""

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, Self

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
from recipes.load import RecipeError

CASES: dict[str, dict[str, Any]] = {
    "eagle3-w8192": {"method": "eagle3", "words": 8192, "steps": 3},
    "eagle3-full": {"method": "eagle3", "words": 49152, "steps": 3, "timed": 2},
    "eagle3-online": {"method": "eagle3", "words": 8192, "steps": 3, "online": True},
    "dflash": {"method": "dflash", "words": 8192},
    "dspark": {"method": "dspark", "words": 8192},
}
HERE = Path(__file__).parent
SPECULATORS = Path.home() / ".cache" / "pacesetter" / "speculators-0.9.0"
SPECFORGE = SPECULATORS.with_name("specforge-0.2.0")
REQUIREMENTS = [
    *("transformers>=4.56.1,<5.16", "datasets<=5.0.1", "loguru<=0.7.3", "numpy<=2.4.6", "tqdm<=4.70.0"),
    *("httpx", "openai>=2", "pydantic-settings", "typer", "accelerate", "psutil"),
]
NUM_DOCUMENTS, LENGTH = 4, 512


def training_step(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """See eval/bench.py."""
    if arguments.against == "specforge" and not any(CASES[case]["method"] == "eagle3" for case in arguments.case):
        raise RecipeError(
            f"--case is {' '.join(arguments.case)}, but specforge is compared for EAGLE-3 only; give eagle3-w8192, say"
        )
    with tempfile.TemporaryDirectory() as name:
        inputs, others_inputs = Path(name) / "inputs.pt", Path(name) / "theirs.pt"
        worker = others_worker(arguments.against, inputs, others_inputs)
        given = features(arguments)
        for case in arguments.case:
            settings = CASES[case]
            if arguments.against == "specforge":
                if settings["method"] != "eagle3":
                    continue
                settings = {**settings, "norm_before_residual": False}  # the layer that it has
            mine, others = case_inputs(settings, given)
            torch.save(mine, inputs)
            torch.save(others, others_inputs)
            ours = [sys.executable, str(HERE / "bench_step.py"), "ours", str(inputs)]
            found = compare(ours, worker, repeats=arguments.repeats, steps=settings.get("timed", 4))
            check_same_work(*found.pop("first_losses"), factor=loss_factor(settings) if arguments.against == "speculators" else 1.0)
            yield {"case": case, "against": arguments.against, **found}


def others_worker(against: str, inputs: Path, others_inputs: Path) -> list[str]:
    """The command that takes the other side's steps."""
    if against == "speculators":
        return [speculators_python(), str(HERE / "bench_speculators.py"), str(others_inputs)]
    if against == "specforge":
        return ["env", f"PYTHONPATH={specforge_path()}", sys.executable, str(HERE / "bench_specforge.py"), str(others_inputs)]
    return [sys.executable, str(HERE / "bench_step.py"), "reference", str(inputs)]


def compare(ours: list[str], theirs: list[str], *, repeats: int, steps: int) -> dict[str, Any]:
    """How both compare, in ``repeats`` pairs of processes that take ``steps`` each, in turn: a machine's speed changes within a
    minute, so that only neighbours can be compared. Medians over all steps, and of the ratios of neighbours. One step goes before
    each, to find again what the system took from a process that waited."""
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
    for _ in range(repeats):
        with Worker(ours, 2 * steps + 1) as one, Worker(theirs, 2 * steps + 1) as other:
            for turn in range(steps + 1):  # the first one warms up
                for worker in (one, other) if turn % 2 else (other, one):
                    worker.step()
                    worker.step()
            runs["theirs"].append(other.result())
            runs["ours"].append(one.result())
    taken = {kind: [seconds for run in found for seconds in run["seconds"][2::2]] for kind, found in runs.items()}
    seconds = median(taken["ours"])
    peak = {kind: max(run["peak_bytes"] for run in found) for kind, found in runs.items()}
    mine = runs["ours"]
    gflops = mine[0]["flops"] / seconds / 1e9
    shares = [floor / step for run in mine for floor, step in zip(run["floor_seconds"], run["seconds_again"], strict=True)]
    return {
        "tokens_per_s": NUM_DOCUMENTS * LENGTH / seconds,
        "speed_ratio": median(theirs / ours for ours, theirs in zip(taken["ours"], taken["theirs"], strict=True)),
        "peak_mib": peak["ours"] / 2**20,
        "memory_ratio": peak["theirs"] / peak["ours"],
        "gflop_per_s": gflops,
        "peak_share": gflops * 1e9 / median(run["matmul_peak"] for run in mine),
        "floor_share": median(shares),
        "first_losses": [found[0]["losses"][0] for found in runs.values()],
    }


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


class Worker:
    """A process that takes a step when it is told to, and waits between."""

    def __init__(self, command: list[str], steps: int) -> None:
        self.command = [*command, "--steps", str(steps), "--in-turn"]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed when the process has ended
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True)

        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.told, self.said = self.process.stdin, self.process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.told, self.said, self.errors):
            with suppress(BrokenPipeError):
                file.close()

    def step(self) -> None:
        """Lets it take a step, and waits for that."""
        self._tell()
        for line in self.said:
            if line == "taken\n":
                return
        self._explain()

    def result(self) -> dict[str, Any]:
        """What it prints last, as JSON."""
        self._tell()
        lines = list(self.said)
        if self.process.wait():
            self._explain()
        (found,) = json.loads(lines[-1])
        return dict(found)

    def _tell(self) -> None:
        with suppress(BrokenPipeError):  # it has ended, and says why elsewhere
            self.told.write("\n")
            self.told.flush()

    def _explain(self) -> NoReturn:
        self.errors.seek(0)
        raise RecipeError(f"{' '.join(self.command)} ended with {self.process.wait()}: {self.errors.read()[-1000:]}")


def run_worker(command: list[str]) -> list[dict[str, Any]]:
    """What a benchmark's process prints last, as JSON: of each of its inputs."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RecipeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-1000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def features(arguments: argparse.Namespace) -> dict[str, Any]:
    """The target's features of four packed documents of random tokens, whose supervised ones are then what it finds most likely;
    its input embedding and head; and what goes into its last norm."""
    folder = resolve_target(TargetConfig(arguments.target))
    model = load_target(folder, TargetConfig(arguments.target, dtype="float32"), torch.device("cpu"))
    teacher = OnlineTeacher(model, AUX_LAYERS)
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    torch.manual_seed(0)
    mask_T = torch.arange(LENGTH) >= round((1 - arguments.supervised) * LENGTH)
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


def ttt(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """See eval/bench.py."""
    given, steps = features(arguments), (2, 4, 7)
    worker = [sys.executable, str(HERE / "bench_step.py"), "ours"]
    with tempfile.TemporaryDirectory() as name:
        paths = [f"{name}/{number}.pt" for number in steps]
        for number, path in zip(steps, paths, strict=True):
            torch.save(case_inputs({**CASES["eagle3-w8192"], "steps": number}, given)[0], path)
        # Steps of 2 and of 7 in turn in one process: a machine's speed changes within a minute.
        few, many = run_worker([*worker, paths[0], paths[-1], "--steps", str(4 * arguments.repeats)])
        peak = [run_worker([*worker, path, "--steps", "1"])[0]["peak_bytes"] / 2**20 for path in paths]
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


def parts(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """See eval/bench.py, attention and loss."""
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "plain": []}
    for _ in range(arguments.repeats):
        for kind, found in runs.items():
            found += run_worker([sys.executable, str(HERE / "bench_parts.py"), arguments.what, kind])
    seconds, peak = (
        {kind: median(run[name] for run in found) for kind, found in runs.items()} for name in ("seconds", "peak_bytes")
    )
    yield {
        "case": arguments.what,
        "speed_ratio": seconds["plain"] / seconds["ours"],
        "peak_mib": peak["ours"] / 2**20,
        "memory_ratio": peak["plain"] / peak["ours"],
    }


def packing(_: argparse.Namespace) -> Iterator[dict[str, Any]]:
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
