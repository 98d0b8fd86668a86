"""The target in running vLLM servers, on this machine or others: many dialogues at once, shared out among them."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TYPE_CHECKING

from data.conversations import SamplingConfig
from data.dialogues import Asking, Dialogue, Ended, Generated, request_seed
from recipes.load import RecipeError

if TYPE_CHECKING:
    from openai import OpenAI

RETRIES = 6
"""Of a request that fails for the server's sake: after half a second at first, then twice as long each time, 8 s at most."""


def generate_remotely(
    urls: Sequence[str],
    dialogues: Iterable[tuple[str, Dialogue]],
    sampling: SamplingConfig,
    *,
    max_length: int,
    seed: int,
    concurrency: int,
) -> Iterator[Ended]:
    """Leads (key, dialogue) pairs with OpenAI-compatible vLLM servers, ``concurrency`` on each; yields each as it ends.

    Prompts go there as token ids and answers come back as such: no template of the server's has a part in it. A dialogue whose
    request still fails after some retries ends without a row.
    """
    clients = [_connect(url) for url in urls]
    models = [client.models.list().data[0].id for client in clients]

    def lead(number: int, key: str, dialogue: Dialogue) -> Ended:
        from openai import OpenAIError

        client, model = clients[number % len(clients)], models[number % len(clients)]
        one = Asking(key, dialogue)
        while one.ended is None:
            try:
                one.answered(_ask(client, model, one, sampling, max_length=max_length, seed=seed))
            except OpenAIError as error:
                one.failed(f"{client.base_url}: {error}")
        return one.ended

    waiting = enumerate(dialogues)
    with ThreadPoolExecutor(concurrency * len(clients)) as pool:
        running: set[Future[Ended]] = set()
        while True:
            room = 2 * concurrency * len(clients) - len(running)
            running |= {pool.submit(lead, number, key, dialogue) for number, (key, dialogue) in islice(waiting, room)}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def _connect(url: str) -> "OpenAI":
    try:
        from openai import APIConnectionError, OpenAI
    except ImportError as error:
        raise RecipeError(f"the package openai is needed to ask servers ({error}); pip install openai") from None
    client = OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none", max_retries=RETRIES, timeout=3600)
    try:
        client.with_options(max_retries=0, timeout=10).models.list()
    except APIConnectionError:
        raise RecipeError(f"no server answers at {url}; start one with: vllm serve <target>") from None
    return client


def _ask(client: "OpenAI", model: str, one: Asking, sampling: SamplingConfig, *, max_length: int, seed: int) -> Generated:
    reply = client.completions.create(
        model=model,
        prompt=one.prompt,
        max_tokens=min(sampling.max_tokens, max_length - len(one.prompt)),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=None if sampling.temperature == 0 else request_seed(seed, one),
        # Said in full: the server would fill in what the target's generation_config.json has, penalties included.
        presence_penalty=0.0,
        frequency_penalty=0.0,
        extra_body={"top_k": sampling.top_k, "repetition_penalty": 1.0, "min_p": 0.0, "return_token_ids": True},
    )
    (choice,) = reply.choices
    return Generated(list(choice.token_ids), choice.text, choice.finish_reason)  # type: ignore[attr-defined]  # vLLM's addition
