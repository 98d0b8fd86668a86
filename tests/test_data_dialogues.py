"""Conversations answered turn by turn, by a target that is a function of its prompt, in this process or behind a server."""

import fcntl
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import data.regenerate
from data.chat import Chat, Message
from data.conversations import SamplingConfig
from data.dialogues import Asking, Dialogue, Ended, Generated, request_seed
from data.regenerate import answer
from data.rows import Conversation, content_id
from data.servers import generate_remotely
from recipes.load import RecipeError
from tests.conftest import ROOT, byte_tokenizer, call_script, run_script, write_jsonl

END = 2
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, **more: Any) -> Message:
    return Message(role="assistant", content=text, **more)


def make_chat(template: str | None = None) -> Chat:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return Chat(tokenizer, {END})


def says(chat: Chat, prompt: list[int]) -> Generated:
    """The target: it says how many tokens it read."""
    text = f"read {len(prompt)}"
    return Generated([*chat.tokenizer(text, add_special_tokens=False)["input_ids"], END], text, "stop")


def lead(dialogue: Dialogue, chat: Chat) -> tuple[dict[str, Any] | None, list[str]]:
    """The row of a dialogue with that target, and the prompts it was asked with, as text."""
    one, prompts = Asking("k", dialogue), []
    while one.ended is None:
        prompts.append(chat.tokenizer.decode(one.prompt))
        one.answered(says(chat, one.prompt))
    return one.ended.row, prompts


def chatml(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def test_turn_by_turn_by_hand() -> None:
    """Each question stands behind what the target said to the one before, not behind what the data set says it said."""
    chat = make_chat()
    asked = Conversation([user("a"), assistant("old"), user("b")])
    row, prompts = lead(answer(asked, chat, max_length=500), chat)
    assert lead(answer(Conversation([user("a"), user("b")]), chat, max_length=500), chat) == (row, prompts)
    first = len(chat.prompt([user("a")]))
    said = f"read {first}"
    assert prompts == [chatml(("user", "a")), chatml(("user", "a"), ("assistant", said), ("user", "b"))]
    assert row is not None
    assert [m["content"] for m in row["messages"]][:3] == ["a", said, "b"]
    assert row["finish_reason"] == "stop"
    ((document),) = row["documents"]
    spans = [chat.tokenizer.decode(document["tokens"][start:end]) for start, end in document["spans"]]
    assert spans == [m["content"] + "<|im_end|>" for m in row["messages"] if m["role"] == "assistant"]


def test_a_template_that_rewrites_gets_a_document_per_turn() -> None:
    chat = make_chat(
        "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}|{% endif %}{% endfor %}"
    )
    row, prompts = lead(answer(Conversation([user("a"), assistant("old"), user("b")]), chat, max_length=500), chat)
    assert prompts == ["a|", "a|b|"]
    assert row is not None
    assert [document["spans"][0][0] for document in row["documents"]] == [2, 4]


def test_tools_are_not_called_anew() -> None:
    """What came back fits only the call that was made: all stays as it is, and the last turn is answered."""
    chat = make_chat()
    asked = [user("a"), assistant("", tool_calls=[CALL]), Message(role="tool", content="7")]
    row, prompts = lead(answer(Conversation(asked), chat, max_length=500), chat)
    assert prompts == [chatml(("user", "a"), ("assistant", ""), ("tool", "7"))]
    assert row is not None
    assert row["messages"][:3] == asked
    assert len(row["messages"]) == 4


def test_where_a_dialogue_ends_early() -> None:
    """Behind an answer that was cut, and where the next prompt leaves no room; a prompt that never had room gives no tokens."""
    chat = make_chat()
    asked = Conversation([user("a"), assistant("old"), user("b")])
    one = Asking("k", answer(asked, chat, max_length=500))
    one.answered(Generated([9, 9], "xx", "length"))
    assert one.ended is not None
    assert one.ended.row is not None
    assert one.ended.row["finish_reason"] == "length"
    assert len(one.ended.row["documents"]) == 1
    first = len(chat.prompt([user("a")]))
    row, prompts = lead(answer(asked, chat, max_length=first + 12), chat)
    assert len(prompts) == 1
    assert row is not None
    assert row["finish_reason"] == "stop"
    row, prompts = lead(answer(asked, chat, max_length=first), chat)
    assert prompts == []
    assert row == {"messages": [user("a")], "documents": [], "finish_reason": "length"}


def test_what_a_template_refuses_ends_with_the_reason() -> None:
    chat = make_chat("{{ raise_exception('no') }}")
    one = Asking("k", answer(Conversation([user("a")]), chat, max_length=500))
    assert one.ended is not None
    assert one.ended.row is None
    assert one.ended.problem == "the chat template refuses it: no"
    one = Asking("k", answer(Conversation([user("a")]), make_chat(), max_length=500))
    one.answered(Generated([9], "x", "abort"))
    assert one.ended is not None
    assert one.ended.row is None
    assert one.ended.problem == "an answer ended with abort"


def test_nothing_is_asked_behind_a_call() -> None:
    """Special tokens inside an answer are not in its text: what a server makes of them cannot be known here."""
    chat = make_chat()
    one = Asking("k", answer(Conversation([user("a"), assistant("old"), user("b")]), chat, max_length=500))
    one.answered(Generated([1, 70, END], "x", "stop"))
    assert one.ended is not None
    assert one.ended.row is not None
    assert len(one.ended.row["documents"]) == 1


def test_seeds_differ_by_key_and_turn() -> None:
    chat = make_chat()
    asked = Conversation([user("a"), assistant("old"), user("b")])
    one, other = (Asking(key, answer(asked, chat, max_length=500)) for key in ("k", "l"))
    before = request_seed(0, one)
    assert before == request_seed(0, Asking("k", answer(asked, chat, max_length=500)))
    one.answered(says(chat, one.prompt))
    assert len({before, request_seed(0, one), request_seed(0, other), request_seed(1, other)}) == 4


@contextmanager
def server(
    chat: Chat,
    *,
    serves: str = "t",
    fail_first: int = 0,
    fail_on: str | None = None,
    seconds: float = 0.0,
    gone_behind: int = 1 << 30,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An OpenAI-compatible server of that target, and the requests it got; each takes some seconds. The first requests, or those
    whose prompt has a text, fail for the server's sake; behind a number of them, it hangs up."""
    got: list[dict[str, Any]] = []
    failures, one_at_a_time = iter(range(fail_first)), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def reply(self, content: dict[str, Any], status: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            model = {"id": "m", "object": "model", "created": 0, "owned_by": "me", "root": f"/x/{serves}"}
            self.reply({"object": "list", "data": [model]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with one_at_a_time:  # two requests at once must not both be the last one before it is gone
                gone = len(got) >= gone_behind
                bad = fail_on is not None and fail_on in chat.tokenizer.decode(request["prompt"])
                bad = not gone and (bad or next(failures, None) is not None)
                if not (gone or bad):
                    got.append(request)
            if gone:
                self.close_connection = True
                return
            if bad:
                self.reply({"error": {"message": "busy"}}, 503)
                return
            time.sleep(seconds)
            said = says(chat, request["prompt"])
            choice = {"index": 0, "text": said.text, "finish_reason": "stop", "token_ids": said.tokens, "logprobs": None}
            self.reply({"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]})

        def log_message(self, *_: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}", got
    httpd.shutdown()


SAMPLING = SamplingConfig(temperature=0.7, top_p=0.9, top_k=5, max_tokens=32)


def remotely(urls: list[str], chat: Chat, count: int, *, concurrency: int) -> list[Ended]:
    return list(remotely_one_by_one(urls, chat, count, concurrency=concurrency))


def remotely_one_by_one(urls: list[str], chat: Chat, count: int, *, concurrency: int) -> Iterator[Ended]:
    asked = (Asking(key, dialogue) for key, dialogue in dialogues(chat, count))
    settings: dict[str, Any] = {"names": {"t", "cache"}, "max_length": 500, "seed": 3, "concurrency": concurrency}
    return generate_remotely(urls, asked, SAMPLING, **settings)


def dialogues(chat: Chat, count: int) -> Iterator[tuple[str, Dialogue]]:
    for i in range(count):
        yield f"k{i}", answer(Conversation([user(f"q{i}."), assistant("old"), user("b")]), chat, max_length=500)


def test_servers_share_the_work_and_give_what_the_target_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers, the first of which fails twice at first: every row is the one that this process would have made."""
    chat = make_chat()
    with server(chat, fail_first=2, seconds=0.02) as (one, got), server(chat, seconds=0.02) as (other, more):
        ended = remotely([one, f"{other}/v1"], chat, 20, concurrency=4)
    expected = {key: lead(dialogue, chat)[0] for key, dialogue in dialogues(chat, 20)}
    assert {end.key: end.row for end in ended} == expected
    assert len(got) + len(more) == 40
    assert min(len(got), len(more)) > 4, "both had work"
    request = next(r for r in got if "q0." in chat.tokenizer.decode(r["prompt"]))
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.0, "return_token_ids": True, "max_tokens": 32}
    assert {name: request[name] for name in wanted} == wanted
    assert len({r["seed"] for r in got + more}) == 40


def test_what_a_server_cannot_answer_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.servers.RETRIES", 1)
    chat = make_chat()
    with server(chat, fail_on="q1.") as (url, _):
        ended = remotely([url], chat, 3, concurrency=2)
    problems = {end.key: end.problem for end in ended}
    assert problems["k0"] is problems["k2"] is None
    assert "busy" in (problems["k1"] or "")
    with pytest.raises(RecipeError, match=r"no server answers at http://127\.0\.0\.1:9; start one with: vllm serve"):
        remotely(["http://127.0.0.1:9"], chat, 1, concurrency=1)
    with server(chat, serves="another") as (url, _), pytest.raises(RecipeError, match=r"serves /x/another, but .* is cache or t"):
        remotely([url], chat, 1, concurrency=1)


def test_a_server_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dialogues go on with the other; with none left, what had ended is kept, and nothing waits for ever."""
    monkeypatch.setattr("data.servers.RETRIES", 0)
    chat = make_chat()
    with server(chat, seconds=0.02) as (url, got), server(chat, gone_behind=3) as (other, more):
        ended = remotely([url, other], chat, 20, concurrency=2)
    assert all(end.problem is None for end in ended)
    assert len(more) == 3
    assert len(got) == 40 - 3
    with server(chat, gone_behind=3) as (url, _):
        ended = []
        with pytest.raises(RecipeError, match=f"no server is left of {url}; start one again, then this"):
            ended.extend(remotely_one_by_one([url], chat, 5, concurrency=1))
    assert [end.key for end in ended] == ["k0"], "three requests are a dialogue of two and half of another"


def test_a_killed_regeneration_goes_on(tmp_path: Path, tiny_target: Path) -> None:
    """kill -9 again and again, wherever it then is: in the end, the rows of an unbroken run, each once."""
    write_jsonl(tmp_path / "prompts.jsonl", [{"turns": [f"q{i}.", "b"]} for i in range(60)])
    for name in ("broken", "whole"):
        (tmp_path / f"{name}.yaml").write_text(
            f"name: {name}\ntarget: {{model: {tiny_target}}}\ndata: {{prompts: {tmp_path / 'prompts.jsonl'}, max_length: 500}}\n"
        )
    script, path = str(ROOT / "data" / "regenerate.py"), tmp_path / "runs" / "broken-data" / "answers.jsonl"
    with server(make_chat(), serves=tiny_target.name, seconds=0.05) as (url, got):
        words = ("--server", url, "--concurrency", "4")
        for enough in (700, 9000, 17_000):  # bytes written so far
            process = subprocess.Popen([sys.executable, script, "broken.yaml", *words], cwd=tmp_path, stderr=subprocess.DEVNULL)
            while process.poll() is None and not (path.is_file() and path.stat().st_size > enough):
                time.sleep(0.01)
            process.kill()
            assert process.wait() == -9, "it was to be killed before its end"
        run_script(script, "broken.yaml", *words, cwd=tmp_path)
        asked = len(got)
        run_script(script, "whole.yaml", *words, cwd=tmp_path)
    assert 120 < asked < 120 + 3 * 4 * 2 * 2, "what was in flight is asked again, and nothing else"
    broken, whole = (
        sorted((tmp_path / "runs" / f"{name}-data" / "answers.jsonl").read_text().splitlines()) for name in ("broken", "whole")
    )
    assert len(whole) == 60
    assert broken == whole


def make_recipe(folder: Path, target: Path, prompts: list[str]) -> Path:
    """Writes r.yaml; returns where its answers will be."""
    write_jsonl(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
    (folder / "r.yaml").write_text(
        f"name: r\ntarget: {{model: {target}}}\ndata: {{prompts: {folder / 'prompts.jsonl'}, max_length: 500}}\n"
    )
    return folder / "runs" / "r-data" / "answers.jsonl"


def test_what_failed_is_listed_and_asked_again(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are kept; one failure in three is more than the recipe allows; the next run asks for that one only."""
    monkeypatch.setattr("data.servers.RETRIES", 0)
    path = make_recipe(tmp_path, tiny_target, ["q0.", "q1.", "q2."])
    failed = path.with_name("failed-answers.jsonl")
    with server(make_chat(), serves=tiny_target.name, fail_on="q1.") as (url, _):
        shown = call_script(data.regenerate.main, "r.yaml", "--server", url, cwd=tmp_path, expect=2).stderr
    assert "not answered: 1 x the server refused a request" in shown
    assert f"1 of 3 rows cannot be used, more than data.max_bad_share = 0.01 (all in {failed.relative_to(tmp_path)})" in shown
    (row,) = map(json.loads, failed.read_text().splitlines())
    assert row["where"] == content_id([user("q1.")])
    assert len(path.read_text().splitlines()) == 2
    with server(make_chat(), serves=tiny_target.name) as (url, got):
        call_script(data.regenerate.main, "r.yaml", "--server", url, cwd=tmp_path)
    assert len(got) == 1
    assert len(path.read_text().splitlines()) == 3
    assert not failed.exists()


def test_one_process_writes_at_a_time(tmp_path: Path, tiny_target: Path) -> None:
    """Two would answer everything twice."""
    path = make_recipe(tmp_path, tiny_target, ["q0."])
    path.parent.mkdir(parents=True)
    with path.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        shown = call_script(data.regenerate.main, "r.yaml", "--server", "http://127.0.0.1:9", cwd=tmp_path, expect=2).stderr
    assert "another process writes runs/r-data/answers.jsonl at this moment; wait for its end, or stop it" in shown


def test_what_ends_without_a_request_is_written(tmp_path: Path, tiny_target: Path) -> None:
    """A prompt that leaves no room has a row, too, so that it is looked at once; with nothing left, no server is asked."""
    path = make_recipe(tmp_path, tiny_target, ["hi", "x" * 600])
    with server(make_chat(), serves=tiny_target.name) as (url, got):
        call_script(data.regenerate.main, "r.yaml", "--server", url, cwd=tmp_path)
    rows = {row["finish_reason"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert rows["length"]["documents"] == []
    assert len(rows["stop"]["documents"]) == len(got) == 1
    before = path.read_text()
    call_script(data.regenerate.main, "r.yaml", "--server", "http://127.0.0.1:9", cwd=tmp_path)
    assert path.read_text() == before
