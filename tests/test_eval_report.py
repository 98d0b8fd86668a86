"""The report's arithmetic by hand, from made-up passes."""

import json
import math
from pathlib import Path

import pytest
import torch

from drafters.acceptance import Acceptance
from drafters.layers import DrafterShape
from drafters.saved import Description, Saved
from eval.confidence import plot, summary
from eval.cost import Costs
from eval.report import Measurement, confidence_lines, markdown, summarise, write_report
from eval.serve import Counters, parse_counters

SHAPE = DrafterShape(8, 8, 1, 1, 8, 10, 8, 64, 1e-5, {})
SAVED = Saved(Path("r"), Description("eagle3", Path("t"), "org/t", "float32", SHAPE, {}), torch.arange(3), {}, 7, 2.0, {})


def one(
    seconds: float, answers: list[list[int]], drafts: int = 0, accepted: tuple[int, ...] = (), decode: float = 1.0
) -> Measurement:
    return Measurement(seconds, answers, Counters(drafts, accepted, decode, 10))


def test_rows_by_hand() -> None:
    """Two repeats of 10 tokens: 10 s and 8 s alone, 5 s and 5 s drafted: 2.0x and 1.6x; one of four answers differs."""
    a, b, c = [1] * 4, [2] * 6, [3] * 6
    measured = {
        (0, 1): [one(10.0, [a, b], decode=0.5), one(8.0, [a, b], decode=0.4)],
        (2, 1): [one(5.0, [a, b], 4, (3, 2)), one(5.0, [a, c], 6, (3, 1))],
    }
    report = summarise(SAVED, measured, {2: Acceptance(10, (6, 2))})
    alone, drafted = report["runs"]
    assert alone["method"] == "none"
    assert alone["tokens_per_s"] == {"median": 1.125, "low": 1.0, "high": 1.25}
    assert alone["ms_per_token"]["high"] == pytest.approx(50.0)
    assert drafted["speedup"] == pytest.approx({"median": 1.8, "low": 1.6, "high": 2.0})
    assert drafted["greedy_identical_share"] == 0.75
    # 10 drafts, of which 6 and 3 were accepted at the two positions.
    assert drafted["acceptance_length"] == pytest.approx(1.9)
    assert drafted["per_position"] == pytest.approx([0.6, 0.3])
    (offline,) = report["offline"]
    assert offline["acceptance_length"] == pytest.approx(1.8)
    assert offline["served_acceptance_length"] == pytest.approx(1.9)


def test_report_files(tmp_path: Path) -> None:
    measured = {
        (0, 1): [one(10.0, [[1] * 10])],
        (2, 1): [one(4.0, [[1] * 10], 4, (3, 2))],
        (3, 1): [one(5.0, [[1] * 10], 4, (3, 2, 0))],
    }
    report = summarise(SAVED, measured, {2: Acceptance(4, (3, 2)), 3: Acceptance(4, (3, 2, 1))})
    report |= {
        "made_from": {"export": {"dtype": "float32"}, "settings": {}},
        "environment": {"versions": {"vllm": "1"}, "vllm_plugins": ["mends"], "machine": "m", "devices": [], "commit": "abcdefgh"},
        "repeated_8_grams": 0.031,
        "interpreted": False,
    }
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 1, "validation/acceptance_length": 1.5}\n')
    write_report(tmp_path, report, metrics=metrics)
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report))
    text = (tmp_path / "report.md").read_text()
    assert "with 2 drafts per target pass, vLLM answers **2.50x** as fast (2.50 to 2.50); 100% of the greedy answers" in text
    assert "| 3 | 2.500 | 2.250 | +11.11% |" in text
    assert "3.1% occurred before" in text
    assert "vllm 1, vLLM plugin mends; m" in text
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
    costs = Costs(alone_ms=10.0, verify_ms=12.0, block_ms=2.0, heads_ms=1.0)
    modelled = {"num_speculative_tokens": 2, "concurrency": 1, "acceptance_length": 2.25, **costs._asdict()}
    report |= {"interpreted": True, "modelled": [{**modelled, "speedup": costs.speedup(2.25)}]}
    interpreted = markdown(report)
    assert "with 2 drafts per target pass, vLLM gets **2.25 tokens** out of a target pass (its kernels were interp" in interpreted
    assert "a model of the costs says ~1.50x" in interpreted  # 2.25 * 10 / 15
    assert "| 2 | 1 | 2.250 | 10.0 | 12.0 | 2.0 | 1.0 | ~1.50 |" in interpreted
    assert "2.50 (" not in interpreted, "times that mean nothing are not shown"
    assert "Confidence" not in text


def test_confidence_in_the_report(tmp_path: Path) -> None:
    """Two drafts of a block behind four prefixes; the second only counts where the first was accepted."""
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [-2.0, 9.0], [-2.0, 9.0]])
    accepted = torch.tensor([[True, True], [True, False], [False, True], [False, False]])
    reached = torch.tensor([[True, True], [True, True], [True, False], [True, False]])
    of_each = [{"temperature": 1.0, "shift": 0.0}, {"temperature": 1.0, "shift": 1.0}]
    calibration = {"of_all": {"temperature": 0.5, "shift": 0.0}, "of_each": of_each}
    found = summary(logits, accepted, reached, calibration=calibration)
    assert found["num_drafts"] == 6
    assert found["accepted_share"] == pytest.approx(0.5)
    # First drafts: two at s(2), accepted, and two at s(-2), rejected; second: one of two at 0.5.
    assert found["raw"]["calibration_error"] == pytest.approx(4 / 6 * sigmoid(-2))
    assert found["exported"]["calibration_error"] == pytest.approx(4 / 6 * sigmoid(-4))
    assert found["scaled"]["calibration_error"] == pytest.approx(4 / 6 * sigmoid(-4) + 2 / 6 * (sigmoid(1) - 0.5))
    # Of nine pairs of an accepted and a rejected draft, one is a tie.
    assert found["raw"]["area_under_curve"] == pytest.approx(8.5 / 9)
    plot(tmp_path / "confidence.png", torch.sigmoid(logits)[reached], accepted[reached])
    lines = "\n".join(confidence_lines({"confidence": found}))
    assert "| as trained | 7.9% | 0.944 |" in lines
    assert "Of 6 drafts on held-out answers, all whose predecessors in the block were accepted; 50.0% were, too." in lines


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_counters_of_a_metrics_page() -> None:
    """Prometheus text as vLLM prints it; positions out of order; counters without drafts."""
    page = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 9.0
vllm:request_decode_time_seconds_sum{engine="0",model_name="m"} 2.5
vllm:request_decode_time_seconds_count{engine="0",model_name="m"} 4.0
vllm:generation_tokens_total{engine="0",model_name="m"} 104.0
"""
    found = parse_counters(page)
    assert found == Counters(12, (9, 5), 2.5, 100)
    assert found.since(Counters(2, (1, 1), 0.5, 40)) == Counters(10, (8, 4), 2.0, 60)
    # Two engines behind one server count side by side.
    both = parse_counters(page + page.replace('engine="0"', 'engine="1"'))
    assert both == Counters(24, (18, 10), 5.0, 200)
    plain = "\n".join(line for line in page.splitlines() if "spec" not in line)
    assert parse_counters(plain) == Counters(0, (), 2.5, 100)
