"""The benchmarks' command line and arithmetic; what they measure is nothing for tests."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import eval.bench as bench
from eval.bench_turns import compare
from recipes.load import ROOT, RecipeError

WORKER = """
import json, sys
name, path, seconds, *words = sys.argv[1:]
assert words[1:] == ["5", "--in-turn"], words
for line in sys.stdin:
    with open(path, "a") as log:
        log.write(name)
    if (turn := turn + 1 if "turn" in globals() else 1) == 7:
        break
    print("taken", flush=True)
given = {"losses": [1.5, 1.0], "peak_bytes": 2**21, "flops": 10**9, "matmul_peak": 4e9, "seconds": json.loads(seconds)}
print(json.dumps([given | {"floor_seconds": [0.1, 0.3], "seconds_again": [0.2, 0.4]}]))
"""


def test_steps_in_turn(tmp_path: Path) -> None:
    """Two turns that count, behind one for warmth; each side takes two steps, the first for warmth."""
    order = tmp_path / "order"

    def worker(name: str, seconds: list[float]) -> list[str]:
        return [sys.executable, "-c", WORKER, name, str(order), json.dumps(seconds)]

    found = compare(worker("o", [9.0, 9.0, 0.25, 9.0, 0.75]), worker("t", [9.0, 9.0, 1.0, 9.0, 1.5]), repeats=1, steps=2, name="x")
    assert order.read_text() == "ttoooottttooto", "turns begin with one and the other; the results last"
    assert found["speed_ratio"] == 3.0, "between 1 / 0.25 and 1.5 / 0.75"
    assert found["seconds"] == 0.5
    assert found["gflop_per_s"] == 2.0
    assert found["peak_share"] == 0.5
    assert found["floor_share"] == pytest.approx(0.625), "between 0.5 and 0.75"
    assert (found["peak_mib"], found["memory_ratio"], found["first_losses"]) == (2.0, 1.0, [1.5, 1.5])


def test_a_side_that_fails_says_why() -> None:
    broken = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    with pytest.raises(RecipeError, match="no such thing"):
        compare(broken, broken, repeats=1, steps=1, name="x")


def test_documented_commands() -> None:
    """Of README and docstring."""
    text = (ROOT / "README.md").read_text() + str(bench.__doc__)
    commands = [shlex.split(line) for line in re.findall(r"eval/bench\.py ([^`\n)]+)", text)]
    assert len(commands) > 6
    for command in commands:
        if "--help" not in command:
            bench.command_line().parse_args(command)


def test_specforge_has_eagle3_only() -> None:
    options = vars(bench.command_line().parse_args(["training-step", "--against", "specforge", "--case", "dflash"]))
    with pytest.raises(RecipeError, match="--case is dflash, but specforge is compared for EAGLE-3 only"):
        bench.training_step(options)
