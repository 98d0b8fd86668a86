"""Runs vLLM's engine in its own process and reports answers, counters and the drafts it proposed.

    python -m tests.vllm_cpu.capture job.json result.json

job: target, speculative (or null), groups; a group has prompts (token ids), max_tokens, temperature, and whether its requests
run one by one. result: per group answers, num_drafts, accepted (per position), and, where requests ran one by one, every call
of the drafter as {prefix, drafts}.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from data.generation import serving_environment
from tests.vllm_cpu.fixes import mend_sampling


class Recorder:
    """Stands in for the drafter's propose(): keeps the tokens it was shown and what it answered, of one request at a time."""

    def __init__(self, runner: Any) -> None:
        self.known: dict[int, int] = {}
        self.proposals: list[dict[str, Any]] = []
        self.propose = runner.drafter.propose
        runner.drafter.propose = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        drafts = self.propose(*args, **kwargs)
        if len(kwargs["next_token_ids"]) == 1:
            positions, tokens = kwargs["target_positions"].tolist(), kwargs["target_token_ids"].tolist()
            rejected = kwargs.get("num_rejected_tokens_gpu")
            kept = len(tokens) - (int(rejected[0]) if rejected is not None else 0)
            self.known |= dict(zip(positions[:kept], tokens[:kept], strict=True))
            prefix = [self.known[i] for i in range(positions[kept - 1] + 1)]
            self.proposals.append({"prefix": [*prefix, int(kwargs["next_token_ids"][0])], "drafts": drafts[0].tolist()})
        return drafts


def counters(engine: Any) -> list[int]:
    """[num_drafts, accepted at position 0, 1, ...] so far."""
    found = {metric.name: metric for metric in engine.get_metrics()}
    if "vllm:spec_decode_num_drafts" not in found:
        return [0]
    accepted = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return [found["vllm:spec_decode_num_drafts"].value, *accepted]


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
        disable_log_stats=False,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    mend_sampling()
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
            }
        )
        if recorder:
            recorder.proposals = []
    return results


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
