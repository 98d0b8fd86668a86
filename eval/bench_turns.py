"""Two processes that take steps in turn, for eval/bench.py."""

import json
import subprocess
import tempfile
from contextlib import suppress
from statistics import median
from typing import Any, NoReturn, Self

from recipes.load import RecipeError
from recipes.progress import progress_bar


def compare(ours: list[str], theirs: list[str], *, repeats: int, steps: int, name: str) -> dict[str, Any]:
    """How both compare, in ``repeats`` pairs of processes that take ``steps`` each, in turn: a machine's speed changes within a
    minute, so that only neighbours can be compared. Medians over all steps, and of the ratios of neighbours. One step goes before
    each, to find again what the system took from a process that waited."""
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
    with progress_bar(total=repeats * (steps + 1), desc=name, unit="turn") as bar:
        for _ in range(repeats):
            with Worker(ours, 2 * steps + 1) as one, Worker(theirs, 2 * steps + 1) as other:
                for turn in range(steps + 1):  # the first one warms up
                    for worker in (one, other) if turn % 2 else (other, one):
                        worker.step()
                        worker.step()
                    bar.update()
                runs["theirs"].append(other.result())
                runs["ours"].append(one.result())
    taken = {kind: [seconds for run in found for seconds in run["seconds"][2::2]] for kind, found in runs.items()}
    seconds = median(taken["ours"])
    peak = {kind: max(run["peak_bytes"] for run in found) for kind, found in runs.items()}
    mine = runs["ours"]
    gflops = mine[0]["flops"] / seconds / 1e9
    shares = [floor / step for run in mine for floor, step in zip(run["floor_seconds"], run["seconds_again"], strict=True)]
    return {
        "seconds": seconds,
        "speed_ratio": median(theirs / ours for ours, theirs in zip(taken["ours"], taken["theirs"], strict=True)),
        "peak_mib": peak["ours"] / 2**20,
        "memory_ratio": peak["theirs"] / peak["ours"],
        "gflop_per_s": gflops,
        "peak_share": gflops * 1e9 / median(run["matmul_peak"] for run in mine),
        "floor_share": median(shares),
        "first_losses": [found[0]["losses"][0] for found in runs.values()],
    }


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
