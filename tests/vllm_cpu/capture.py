"""Runs vLLM's engine in its own process and reports answers, counters and the drafts it proposed.

    python -m tests.vllm_cpu.capture job.json result.json

job: target, speculative (or null), groups; a group has prompts (token ids), max_tokens, temperature, and whether its requests
run one by one. result: per group answers, num_drafts, accepted (per position), and, where requests ran one by one, every call
of the drafter as {prefix, drafts}. serve() is how a test calls it.
"""

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.generation import serving_environment
from drafters.acceptance import Acceptance
from tests.conftest import ROOT, run_script

TRITON_INTERPRETER = {
    "PYTHONPATH": str(ROOT / "tests" / "vllm_cpu" / "triton_interpreter"),
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}


class Group(NamedTuple):
    """Requests to make of one engine. probes: (head inputs, tokens before) to ask DSpark's confidence head for as well."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float = 0.0
    one_by_one: bool = False
    probes: tuple[list[list[float]], list[int]] | None = None


class Served(NamedTuple):
    """What came of a group: token ids of the answers; vLLM's counts; the drafts of every call behind their prefix; the
    confidence of each probe."""

    answers: list[list[int]]
    acceptance: Acceptance
    proposals: list[tuple[list[int], list[int]]]
    confidence: list[float]


def serve(folder: Path, target: Path, groups: list[Group], *, speculative: dict[str, Any] | None) -> list[Served]:
    """The groups served, one after another, by one engine in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    job = {"target": str(target), "speculative": speculative, "groups": [group._asdict() for group in groups]}
    (folder / "job.json").write_text(json.dumps(job))
    own = json.loads((target / "config.json").read_text()).get("speculators_model_type")
    method = speculative["method"] if speculative else own
    environment = TRITON_INTERPRETER if method == "dspark" else {}
    words = ("-m", "tests.vllm_cpu.capture", str(folder / "job.json"), str(folder / "result.json"))
    run_script(*words, cwd=ROOT, **environment)
    return [
        Served(
            result["answers"],
            Acceptance(result["num_drafts"], tuple(result["accepted"])),
            [(call["prefix"], call["drafts"]) for call in result["proposals"]],
            result["confidence"],
        )
        for result in json.loads((folder / "result.json").read_text())
    ]


class Recorder:
    """Stands in for the drafter's propose(): keeps the tokens it was shown and what it answered, of one request at a time."""

    def __init__(self, runner: Any) -> None:
        self.known: dict[int, int] = {}
        self.proposals: list[dict[str, Any]] = []
        self.drafter = runner.drafter if hasattr(runner, "drafter") else runner.speculator
        self.propose = self.drafter.propose
        self.shown = self.shown_v1 if hasattr(runner, "drafter") else self.shown_v2
        self.signature = inspect.signature(self.propose)
        self.drafter.propose = self

    def shown_v1(self, arguments: dict[str, Any]) -> tuple[list[int], list[int], int, int] | None:
        """(positions, tokens, how many of them were rejected, newest token) of a call for one request, else None."""
        if len(arguments["next_token_ids"]) != 1:
            return None
        rejected = arguments.get("num_rejected_tokens_gpu")
        return (
            arguments["target_positions"].tolist(),
            arguments["target_token_ids"].tolist(),
            int(rejected[0]) if rejected is not None else 0,
            int(arguments["next_token_ids"][0]),
        )

    def shown_v2(self, arguments: dict[str, Any]) -> tuple[list[int], list[int], int, int] | None:
        """The same of vLLM's second model runner."""
        batch = arguments["input_batch"]
        if arguments.get("dummy_run") or batch.num_reqs != 1:
            return None
        slot = int(batch.idx_mapping[0])
        sampled = int(arguments["num_sampled"][0]) > 0
        newest = arguments["last_sampled"].flatten()[slot] if sampled else arguments["next_prefill_tokens"][slot]
        count = batch.num_tokens
        rejected = int(arguments["num_rejected"][0])
        return batch.positions[:count].tolist(), batch.input_ids[:count].tolist(), rejected, int(newest)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shown = self.shown(self.signature.bind(*args, **kwargs).arguments)
        drafts = self.propose(*args, **kwargs)
        if shown is not None:
            positions, tokens, rejected, newest = shown
            kept = len(tokens) - rejected
            self.known |= dict(zip(positions[:kept], tokens[:kept], strict=True))
            prefix = [self.known[i] for i in range(positions[kept - 1] + 1)]
            self.proposals.append({"prefix": [*prefix, newest], "drafts": drafts[0].tolist()})
        return drafts


def counters(engine: Any) -> list[int]:
    """[num_drafts, accepted at position 0, 1, ...] so far."""
    found = {metric.name: metric for metric in engine.get_metrics()}
    if "vllm:spec_decode_num_drafts" not in found:
        return [0]
    accepted = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return [found["vllm:spec_decode_num_drafts"].value, *accepted]


def confidence(drafter: Any, probes: tuple[list[list[float]], list[int]]) -> list[float]:
    """What vLLM's own class makes of inputs to the confidence head; its CPU runner never asks."""
    hidden, before = (torch.tensor(part) for part in probes)
    values: list[float] = drafter.model.compute_confidence(hidden, drafter.model.markov_embed(before)).tolist()
    return values


def main(job: dict[str, Any]) -> list[dict[str, Any]]:
    os.environ.update(serving_environment())
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        job["target"],
        speculative_config=job["speculative"],
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        disable_log_stats=False,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    recorder = None
    if engine.llm_engine.vllm_config.speculative_config:
        core: Any = engine.llm_engine.engine_core
        recorder = Recorder(core.engine_core.model_executor.driver_worker.worker.model_runner)
    results = []
    for group in job["groups"]:
        before = counters(engine)
        sampling = SamplingParams(
            temperature=group["temperature"], max_tokens=group["max_tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in group["prompts"]]
        rounds = [[prompt] for prompt in prompts] if group["one_by_one"] else [prompts]
        outputs = [output for few in rounds for output in engine.generate(few, sampling, use_tqdm=False)]
        since = [now - then for now, then in zip(counters(engine), before, strict=True)]
        results.append(
            {
                "answers": [list(output.outputs[0].token_ids) for output in outputs],
                "num_drafts": since[0],
                "accepted": since[1:],
                "proposals": recorder.proposals if recorder and group["one_by_one"] else [],
                "confidence": confidence(recorder.drafter, group["probes"]) if recorder and group["probes"] else [],
            }
        )
        if recorder:
            recorder.proposals = []
    return results


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
