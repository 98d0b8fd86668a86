"""How far a DSpark drafter's confidence can be trusted, on the target's answers to the held-out prompts.

    python eval/confidence.py runs/smollm2_cpu-dspark

Writes confidence.json and confidence.png, a reliability diagram, to runs/<name>/report/; eval/speedup.py does the same.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.batch import Batch, Document
from drafters.calibration import Scaling, area_under_curve, calibration_error
from drafters.dspark import DSparkDrafter
from drafters.saved import Saved, read_saved
from eval.acceptance import held_out_answers, load_trained
from recipes.load import RecipeError, run_script
from recipes.progress import progress_bar


def judge(saved: Saved, answers: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Confidence logits, accepted and reached, each [R, K], of the drafts behind every prefix of the answers."""
    teacher, drafter = load_trained(saved)
    assert isinstance(drafter, DSparkDrafter)

    def batch(prompt: list[int], answer: list[int]) -> Batch:
        tokens_T = torch.tensor(prompt + answer)
        return teacher.batch([[Document("", tokens_T, torch.arange(len(tokens_T)) >= len(prompt))]])

    batches = (batch(*pair) for pair in progress_bar(answers, desc="confidence", unit="answer"))
    return drafter.judge_confidence(batches, teacher.head)


def summary(logits_RK: Tensor, accepted_RK: Tensor, reached_RK: Tensor, *, calibration: dict[str, Any]) -> dict[str, Any]:
    """Calibration error and area under the curve of the reached drafts: raw, as exported, and with a scaling of each draft."""
    accepted_R = accepted_RK[reached_RK]
    found: dict[str, Any] = {"num_drafts": len(accepted_R), "accepted_share": float(accepted_R.float().mean())}
    exported_RK, scaled_RK = scaled(logits_RK, calibration)
    for name, scores_RK in (("raw", logits_RK), ("exported", exported_RK), ("scaled", scaled_RK)):
        confidence_R = torch.sigmoid(scores_RK)[reached_RK]
        found[name] = {
            "calibration_error": calibration_error(confidence_R, accepted_R),
            "area_under_curve": area_under_curve(confidence_R, accepted_R),
        }
    return found


def scaled(logits_RK: Tensor, calibration: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits as the exported head gives them, and those with the scaling of each draft of a block on top."""
    exported_RK = Scaling(**calibration["of_all"]).of(logits_RK)
    columns = zip(exported_RK.unbind(1), calibration["of_each"], strict=True)
    return exported_RK, torch.stack([Scaling(**of_one).of(logits_R) for logits_R, of_one in columns], dim=1)


def plot(path: Path, confidence_R: Tensor, accepted_R: Tensor) -> None:
    """Reliability diagram: the share that was accepted, against the confidence."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bins = (confidence_R * 10).long().clamp(0, 9)
    filled = [b for b in range(10) if (bins == b).any()]
    means = [float(confidence_R[bins == b].mean()) for b in filled]
    shares = [float(accepted_R[bins == b].float().mean()) for b in filled]
    figure, axes = pyplot.subplots(figsize=(4.5, 4.2), layout="constrained")
    axes.plot([0, 1], [0, 1], color="gray", linewidth=0.8)
    axes.plot(means, shares, marker="o")
    axes.set(title="confidence, scaled", xlabel="confidence", ylabel="accepted", xlim=(0, 1), ylim=(0, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def measure(saved: Saved, answers: list[tuple[list[int], list[int]]], folder: Path) -> dict[str, Any]:
    """The summary on (prompt, greedy answer) token ids, which is also written to the folder, with its picture."""
    logits_RK, accepted_RK, reached_RK = judge(saved, answers)
    found = summary(logits_RK, accepted_RK, reached_RK, calibration=saved.calibration)
    _, scaled_RK = scaled(logits_RK, saved.calibration)
    plot(folder / "confidence.png", torch.sigmoid(scaled_RK)[reached_RK], accepted_RK[reached_RK])
    (folder / "confidence.json").write_text(json.dumps(found, indent=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder of DSpark, for example runs/smollm2_cpu-dspark")
    arguments = parser.parse_args()
    saved = read_saved(arguments.run)
    if saved.description.method != "dspark":
        raise RecipeError(f"{arguments.run} is of {saved.description.method}, which has no confidence head; give a run of dspark")
    if not saved.calibration:
        raise RecipeError(f"{arguments.run} was not calibrated; start its training again, which ends with that")
    folder = arguments.run / "report"
    folder.mkdir(exist_ok=True)
    print(json.dumps(measure(saved, held_out_answers(arguments.run), folder), indent=1))


if __name__ == "__main__":
    run_script(main)
