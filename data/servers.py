"""The target in running vLLM servers, on this machine or others: many dialogues at once, each server as many as it can."""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from data.conversations import SamplingConfig
from data.dialogues import Asking, Ended, Generated, request_seed, room
from recipes.load import RecipeError

if TYPE_CHECKING:
    from openai import OpenAI

RETRIES = 6
"""Of a request that fails for the server's sake: after half a second at first, then twice as long each time, 8 s at most."""


def generate_remotely(
    urls: Sequence[str],
    dialogues: Iterable[Asking],
    sampling: SamplingConfig,
    *,
    names: set[str],
    max_length: int,
    seed: int,
    concurrency: int,
) -> Iterator[Ended]:
    """Leads dialogues with OpenAI-compatible vLLM servers, ``concurrency`` on each; yields each as it ends. names: the last part of
    what they may serve, a path or an id.

    Prompts go there as token ids and answers come back as such: no template of the server's has a part in it. A dialogue whose
    request still fails after some retries ends without a row; those of a server that is gone go on with another one. RecipeError
    when none is left.
    """
    servers = [_connect(url, names) for url in urls]
    left = _Left(dialogues)
    ended: SimpleQueue[Ended | BaseException | None] = SimpleQueue()

    def work(client: "OpenAI", model: str) -> None:
        try:
            while (one := left.take()) is not None:
                if _lead(client, model, one, sampling, max_length=max_length, seed=seed):
                    assert one.ended is not None
                    ended.put(one.ended)
                else:
                    left.give_back(one)
                    break
        except BaseException as error:  # whatever it is, the thread that waits for it has to know
            ended.put(error)
        ended.put(None)

    # Daemons: at an interrupt or an error the script ends, and what is in flight is asked again in the next run.
    threads = [threading.Thread(target=work, args=server, daemon=True) for server in servers for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            one = ended.get()
            if isinstance(one, BaseException):
                raise one
            if one is None:
                running -= 1
            else:
                yield one
    finally:
        left.close()
    if left.returned:
        raise RecipeError(f"no server is left of {', '.join(urls)}; start one again, then this: it goes on where it stopped")


class _Left:
    """What is still to be asked, for threads to take from."""

    def __init__(self, dialogues: Iterable[Asking]) -> None:
        self.waiting, self.returned, self.lock, self.open = iter(dialogues), deque[Asking](), threading.Lock(), True

    def take(self) -> Asking | None:
        with self.lock:
            if self.returned:
                return self.returned.popleft()
            return next(self.waiting, None) if self.open else None

    def give_back(self, one: Asking) -> None:
        with self.lock:
            self.returned.append(one)

    def close(self) -> None:
        """No more of them are begun."""
        with self.lock:
            self.open = False


def _lead(client: "OpenAI", model: str, one: Asking, sampling: SamplingConfig, *, max_length: int, seed: int) -> bool:
    """Leads a dialogue to its end; False where the server is gone before that."""
    from openai import APIConnectionError, OpenAIError

    while one.ended is None:
        try:
            one.answered(_ask(client, model, one, sampling, max_length=max_length, seed=seed))
        except APIConnectionError:
            return False
        except OpenAIError as error:
            one.failed(f"the server refused a request: {client.base_url}: {error}")
    return True


def _connect(url: str, names: set[str]) -> tuple["OpenAI", str]:
    """A client, and the name of the model it serves; RecipeError where that is none of ``names``."""
    try:
        from openai import APIConnectionError, OpenAI, OpenAIError
    except ImportError as error:
        raise RecipeError(f"the package openai is needed to ask servers ({error}); pip install openai") from None
    base = url.rstrip("/").removesuffix("/v1")
    client = OpenAI(base_url=f"{base}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=RETRIES, timeout=3600)
    try:
        model = client.with_options(max_retries=0, timeout=10).models.list().data[0]
    except APIConnectionError:
        raise RecipeError(f"no server answers at {url}; start one with: vllm serve <target>") from None
    except OpenAIError as error:
        raise RecipeError(f"{url} refuses to say what it serves: {error}; a key is read from OPENAI_API_KEY") from None
    served = str((model.model_extra or {}).get("root") or model.id)  # root: where vLLM loaded it from, whatever name it goes by
    if Path(served).name not in names:
        raise RecipeError(f"{url} serves {served}, but the recipe's target is {' or '.join(sorted(names))}; serve that one")
    return client, model.id


def _ask(client: "OpenAI", model: str, one: Asking, sampling: SamplingConfig, *, max_length: int, seed: int) -> Generated:
    reply = client.completions.create(
        model=model,
        prompt=one.prompt,
        max_tokens=room(one, sampling, max_length),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=None if sampling.temperature == 0 else request_seed(seed, one),
        # Said in full: the server would fill in what the target's generation_config.json has, penalties included.
        presence_penalty=0.0,
        frequency_penalty=0.0,
        extra_body={"top_k": sampling.top_k, "repetition_penalty": 1.0, "min_p": 0.0, "return_token_ids": True},
    )
    (choice,) = reply.choices
    tokens = (choice.model_extra or {}).get("token_ids")
    if tokens is None:
        raise RecipeError(f"{client.base_url} returns no token ids; it has to be vLLM, 0.10.2 or newer")
    return Generated(list(tokens), choice.text, choice.finish_reason)
