"""vLLM's offline engine in this process, for the target to write prompts and answers.

vLLM takes all the cores (or the GPU) it finds, so the process that used it ends before training starts.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from data.conversations import DataConfig, SamplingConfig, read_jsonl
from data.target import TargetConfig, target_fingerprint
from recipes.load import RecipeError, to_plain
from recipes.progress import progress_bar

if TYPE_CHECKING:
    from vllm import LLM

MAX_SEQUENCES = 128


class Generated(NamedTuple):
    """What the target wrote after a prompt: key (the request's), tokens, text, finish_reason ("stop" or "length")."""

    key: str
    tokens: list[int]
    text: str
    finish_reason: str


def serving_environment() -> dict[str, str]:
    """Environment variables vLLM wants here, less those the user has set.

    Quiet logs; and, where there is no GPU, a KV cache of fixed size (GiB), for which vLLM would otherwise take most of the
    memory and a minute of warming up, and engine and worker in one process: in two, the engine's waiting loop takes a core
    from the worker (on 2 cores: 15 tokens/s instead of 20, 2026-11-29).
    """
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR"}
    if not torch.cuda.is_available():
        wanted |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def open_engine(folder: Path, target: TargetConfig, *, max_length: int, tensor_parallel_size: int) -> "LLM":
    """The target in vLLM's offline engine, in this process; RecipeError where vLLM is not installed."""
    os.environ.update(serving_environment())
    try:
        from vllm import LLM
    except ImportError as error:
        raise RecipeError(f"vLLM is needed to generate ({error}); install it as README.md says for your machine") from None
    return LLM(
        str(folder),
        dtype=target.dtype,
        max_model_len=max_length,
        max_num_seqs=MAX_SEQUENCES,
        tensor_parallel_size=tensor_parallel_size,
        # Compiling takes longer on a CPU than it saves.
        enforce_eager=not torch.cuda.is_available(),
    )


def generate(
    engine: "LLM", prompts: Iterable[tuple[str, list[int]]], sampling: SamplingConfig, *, max_length: int, seed: int
) -> Iterator[Generated]:
    """Yields what the target writes after each (key, prompt tokens), as it finishes.

    A request's seed is a function of ``seed`` and its key, so that a resumed run samples what an unbroken one would.
    """
    from vllm import RequestOutput, SamplingParams
    from vllm.inputs import TokensPrompt

    llm, waiting, more = engine.llm_engine, iter(prompts), True
    while more or llm.has_unfinished_requests():
        # Enough requests that the batch stays full, not so many that millions of prompts lie in memory.
        while more and llm.get_num_unfinished_requests() < 4 * MAX_SEQUENCES:
            request = next(waiting, None)
            if request is None:
                more = False
                break
            key, tokens = request
            params = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=min(sampling.max_tokens, max_length - len(tokens)),
                seed=None if sampling.temperature == 0 else _request_seed(seed, key),
            )
            llm.add_request(key, TokensPrompt(prompt_token_ids=tokens), params)
        for output in llm.step():
            if isinstance(output, RequestOutput) and output.finished:
                (completion,) = output.outputs
                assert completion.finish_reason is not None
                yield Generated(output.request_id, list(completion.token_ids), completion.text, completion.finish_reason)


def generate_into(
    path: Path,
    requests: dict[str, list[int]],
    sampling: SamplingConfig,
    *,
    target: TargetConfig,
    folder: Path,
    data: DataConfig,
    to_row: Callable[[Generated], dict[str, Any]],
) -> None:
    """Generates for every request (key -> prompt tokens) that has no row in the JSONL file ``path`` yet.

    A row is written as each request ends, with "key" and what it was made with, so that a killed run loses only what was in
    flight. Raises RecipeError when the rows there were made by another target or with other sampling.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    made_with = {
        "target": target_fingerprint(folder),
        "sampling": to_plain(sampling),
        "max_length": data.max_length,
        "seed": data.seed,
    }
    done = _finished_keys(path, made_with) & requests.keys()
    todo = {key: tokens for key, tokens in requests.items() if key not in done}
    if not todo:
        return
    engine = open_engine(folder, target, max_length=data.max_length, tensor_parallel_size=data.tensor_parallel_size)
    num_tokens, start = 0, time.monotonic()
    with (
        path.open("a", encoding="utf-8") as file,
        progress_bar(total=len(requests), initial=len(done), desc=path.stem, unit="row") as bar,
    ):
        for output in generate(engine, todo.items(), sampling, max_length=data.max_length, seed=data.seed):
            row = {"key": output.key, **to_row(output), "finish_reason": output.finish_reason, **made_with}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            num_tokens += len(output.tokens)
            bar.set_postfix_str(f"{num_tokens / (time.monotonic() - start):.0f} tokens/s", refresh=False)
            bar.update()


def _finished_keys(path: Path, made_with: dict[str, Any]) -> set[str]:
    if not path.is_file():
        return set()
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # a line that a kill cut short
            file.truncate(whole)
    keys = set()
    for number, row in read_jsonl(path):
        for name, value in made_with.items():
            if row.get(name) != value:
                raise RecipeError(
                    f"{path}, line {number}: {name} is {row.get(name)}, but this recipe has {value}; "
                    "give the recipe another name, or delete that file"
                )
        keys.add(row["key"])
    return keys


def _request_seed(seed: int, key: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}-{key}".encode()).digest()[:4], "big")
