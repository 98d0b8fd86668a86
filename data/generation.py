"""vLLM's offline engine in this process, for the target to write prompts and answers.

vLLM takes all the cores (or the GPU) it finds, so the process that used it ends before training starts.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from data.conversations import DataConfig, SamplingConfig
from data.dialogues import Asking, Dialogue, Ended, Generated, request_seed, room
from data.servers import generate_remotely
from data.sources import Refusals, Source, parse, rows
from data.target import TargetConfig, target_fingerprint
from recipes.files import drop_half_line, lock
from recipes.load import RecipeError, to_plain
from recipes.progress import progress_bar

if TYPE_CHECKING:
    from vllm import LLM

MAX_SEQUENCES = 128


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
    engine: "LLM",
    dialogues: Iterable[Asking],
    sampling: SamplingConfig,
    *,
    max_length: int,
    seed: int,
    stop: Sequence[int] = (),
) -> Iterator[Ended]:
    """Leads dialogues with the offline engine, many at once; yields each as it ends. stop: tokens that end an answer, too.

    A request's seed is a function of ``seed``, its key and its turn, so that a resumed run samples what an unbroken one would.
    """
    from vllm import RequestOutput, SamplingParams
    from vllm.inputs import TokensPrompt

    llm, waiting, more = engine.llm_engine, iter(dialogues), True
    asking: dict[str, Asking] = {}

    def ask(one: Asking) -> None:
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=room(one, sampling, max_length),
            stop_token_ids=list(stop),
            seed=None if sampling.temperature == 0 else request_seed(seed, one),
        )
        asking[f"{one.key}/{one.turn}"] = one
        llm.add_request(f"{one.key}/{one.turn}", TokensPrompt(prompt_token_ids=one.prompt), params)

    while more or asking:
        # Enough requests that the batch stays full, not so many that millions of prompts lie in memory.
        while more and len(asking) < 4 * MAX_SEQUENCES:
            one = next(waiting, None)
            if one is None:
                more = False
                break
            ask(one)
        for output in llm.step() if asking else ():
            if isinstance(output, RequestOutput) and output.finished:
                (completion,) = output.outputs
                one = asking.pop(output.request_id)
                one.answered(Generated(list(completion.token_ids), completion.text, completion.finish_reason or "nothing"))
                if one.ended:
                    yield one.ended
                else:
                    ask(one)


def generate_into(
    path: Path,
    dialogues: Callable[[], Iterable[tuple[str, Dialogue]]],
    sampling: SamplingConfig,
    *,
    target: TargetConfig,
    folder: Path,
    data: DataConfig,
    stop: Sequence[int] = (),
    servers: Sequence[str] = (),
    concurrency: int = 64,
) -> None:
    """Leads every dialogue that has no row in the JSONL file ``path`` yet, in the offline engine or with running servers.

    dialogues: gives them, each with a key, from the first one on. stop: tokens that end an answer, besides the target's own. A row
    is written as each ends, with "key" and what it was made with, so that a killed run loses only what was in flight; those that
    failed are listed beside ``path``, and tried again in the next run. Raises RecipeError when the rows there were made by another
    target or otherwise, when another process writes them, and at the end when too many dialogues failed.
    """
    made_with = {
        "target": target_fingerprint(folder),
        "chat_template_kwargs": data.chat_template_kwargs,
        "sampling": to_plain(sampling),
        "max_length": data.max_length,
        "seed": data.seed,
    }
    keys = [key for key, _ in dialogues()]  # before anything is written: their sources may be at fault
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        lock(file, path)
        done = _finished_keys(path, made_with)
        total = sum(key not in done for key in keys)
        problems = Refusals(len(done) + total, listed_in=path.with_name(f"failed-{path.name}"))
        at_once: list[Ended] = []
        waiting: Iterator[Asking] = _askable(dialogues(), done, at_once)
        ended: Iterable[Ended] = ()
        first = next(waiting, None)
        if first is not None:
            waiting = chain([first], waiting)
            settings = {"max_length": data.max_length, "seed": data.seed}
            if servers:
                names = {folder.name, Path(target.model).name}
                ended = generate_remotely(servers, waiting, sampling, names=names, concurrency=concurrency, **settings)
            else:
                engine = open_engine(folder, target, max_length=data.max_length, tensor_parallel_size=data.tensor_parallel_size)
                ended = generate(engine, waiting, sampling, stop=stop, **settings)
        if total:
            _write(file, chain(ended, at_once), total=total, title=path.stem, made_with=made_with, problems=problems)
    for line in problems.lines():
        print(f"not answered: {line}", file=sys.stderr)
    problems.check(data.max_bad_share)


def _askable(dialogues: Iterable[tuple[str, Dialogue]], done: set[str], at_once: list[Ended]) -> Iterator[Asking]:
    """Those that are not done yet. at_once takes in those that end without a prompt: too long a one, or refused."""
    for key, dialogue in dialogues:
        if key not in done:
            one = Asking(key, dialogue)
            if one.ended is None:
                yield one
            else:
                at_once.append(one.ended)


def _write(file: IO[str], ended: Iterable[Ended], *, total: int, title: str, made_with: dict[str, Any], problems: Refusals) -> None:
    """Appends a row as each dialogue ends; counts those that failed."""
    num_tokens, start = 0, time.monotonic()
    with progress_bar(total=total, desc=title, unit="row") as bar:
        for one in ended:
            if one.row is None:
                problems.add(one.key, *_reason(one))
            else:
                file.write(json.dumps({"key": one.key, **one.row, **made_with}, ensure_ascii=False) + "\n")
                file.flush()
            num_tokens += one.num_tokens
            bar.set_postfix_str(f"{num_tokens / (time.monotonic() - start):.0f} tokens/s", refresh=False)
            bar.update()


def _reason(one: Ended) -> tuple[str, str]:
    """(what failed dialogues of its kind have in common, all of it)."""
    problem = one.problem or ""
    return problem.partition(":")[0], problem


def _finished_keys(path: Path, made_with: dict[str, Any]) -> set[str]:
    drop_half_line(path)
    keys = set()
    for line in rows(Source(str(path))):
        row = parse(line)
        for name, value in made_with.items():
            if row.get(name) != value:
                raise RecipeError(
                    f"{line.where}: {name} is {row.get(name)}, but this recipe has {value}; "
                    "give the recipe another name, or delete that file"
                )
        keys.add(row["key"])
    return keys
