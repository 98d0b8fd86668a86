"""The whole path through the scripts, as a user types them, on a tiny target with real vLLM servers; and every user's mistake."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data.chat import Chat
from data.conversations import SamplingConfig, SynthesisConfig
from data.dialogues import Asking
from data.generation import generate
from data.synthesize import Filter, distinct, user_header, write
from tests.conftest import ROOT, byte_tokenizer, call_script, make_target, run_script, write_jsonl

RECIPE = """
name: tiny
target: {{model: {target}, dtype: float32}}
data:
  prompts: {prompts}
  answers: {{temperature: 0, max_tokens: 24}}
  keep_truncated: true
  max_length: 80
  test_share: 0.4
  validation_share: 0.1
eagle3:
  drafter: {{aux_layers: [2, 4, 6], draft_vocab_size: 128, num_steps: 2}}
  optim: {{lr: 3e-3, epochs: 12}}
train: {{row_tokens: 160, rows_per_step: 2, rows_per_device: 2, validations: 2, feature_cache_gib: 1}}
"""


def script(name: str, *words: str, cwd: Path, expect: int = 0, **environment: str) -> str:
    """What the script printed, stdout then stderr."""
    result = run_script(str(ROOT / name), *words, cwd=cwd, expect=expect, **environment)
    return result.stdout + result.stderr


def make_workplace(folder: Path, target: Path) -> Path:
    write_jsonl(folder / "prompts.jsonl", [{"prompt": f"say {chr(97 + i)}{i}"} for i in range(20)])
    (folder / "tiny.yaml").write_text(RECIPE.format(target=target, prompts=folder / "prompts.jsonl"))
    return folder


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A workplace whose prompts the target has answered."""
    folder = make_workplace(tmp_path_factory.mktemp("scripts"), tiny_target)
    shown = script("data/regenerate.py", "tiny.yaml", cwd=folder)
    assert "20 conversations" in shown
    assert "next: accelerate launch train/eagle3.py tiny.yaml" in shown
    return folder


@pytest.mark.vllm
def test_killed_generation_goes_on(answered: Path) -> None:
    """With its last lines gone and one cut in half, it answers just what is missing, to the same rows as an unbroken run."""
    path = answered / "runs" / "tiny-data" / "answers.jsonl"
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[:13]) + lines[13][:40])
    script("data/regenerate.py", "tiny.yaml", cwd=answered)
    assert sorted(path.read_text().splitlines()) == sorted(whole.splitlines())
    assert path.read_text().startswith("".join(lines[:13]))
    # Nothing is left to do, so no engine starts.
    before = path.stat().st_mtime_ns
    assert "20 conversations" in script("data/regenerate.py", "tiny.yaml", cwd=answered)
    assert path.stat().st_mtime_ns == before


@pytest.mark.vllm
def test_recorded_tokens_are_the_templates(answered: Path, tiny_target: Path) -> None:
    """What was read is what the template renders, and what is supervised ends where the answer does."""
    chat = Chat.load(tiny_target)
    for line in (answered / "runs" / "tiny-data" / "answers.jsonl").read_text().splitlines():
        row = json.loads(line)
        (recorded,) = row["documents"]
        ((start, end),) = recorded["spans"]
        assert recorded["tokens"][:start] == chat.prompt(row["messages"][:1])
        assert end == len(recorded["tokens"])
        if row["finish_reason"] == "length":
            assert end == start + 24
        else:
            assert recorded["tokens"][end - 1] in chat.eos


@pytest.mark.vllm
def test_masks_are_what_was_generated(tmp_path: Path, smollm2: Path) -> None:
    """SmolLM2's own answers, turn by turn, back through its template: what is supervised is exactly what vLLM generated."""
    turns = ["Say hello in three words.", "Name one colour, in one word.", "What is a spoon for? One short sentence."]
    write_jsonl(tmp_path / "prompts.jsonl", [{"turns": [turns[i], turns[j]]} for i in range(3) for j in range(3) if i != j])
    (tmp_path / "r.yaml").write_text(
        f"name: r\ntarget: {{model: {smollm2}, dtype: float32}}\n"
        f"data: {{prompts: {tmp_path / 'prompts.jsonl'}, answers: {{max_tokens: 48}}, max_length: 200}}\n"
    )
    script("data/regenerate.py", "r.yaml", cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "runs/r-data/answers.jsonl").read_text().splitlines()]
    chat, whole = Chat.load(smollm2), 0
    for row in rows:
        (recorded,) = row["documents"]
        (found,) = chat.encode(row["messages"])
        # An answer that was cut has no end yet; the template shows one.
        cut = row["finish_reason"] == "length"
        assert found.tokens[: len(found.tokens) - cut] == recorded["tokens"]
        *before, (start, end) = [tuple(span) for span in recorded["spans"]]
        assert found.spans == [*before, (start, end + cut)]
        whole += sum(recorded["tokens"][end - 1] in chat.eos for _, end in recorded["spans"])
    assert len(rows) == 6
    assert whole >= 6, "most answers were to come to an end"


@pytest.mark.vllm
def test_train_export_serve_measure(answered: Path) -> None:
    """accelerate launch, export, offline acceptance, and a served comparison whose second run reuses the first."""
    launch = (
        "-m",
        "accelerate.commands.launch",
        str(ROOT / "train" / "eagle3.py"),
        "tiny.yaml",
        "train.trackers=[wandb,tensorboard]",
    )
    trained = run_script(*launch, cwd=answered, WANDB_MODE="offline")
    assert "next: python export/checkpoint.py runs/tiny-eagle3" in trained.stdout
    run = answered / "runs" / "tiny-eagle3"
    assert list(run.glob("wandb/offline-run-*")), "wandb wrote nothing"
    board = EventAccumulator(str(run / "pacesetter")).Reload()
    logged = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    assert [event.value for event in board.Scalars("loss")] == pytest.approx([row["loss"] for row in logged])
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    assert recipe["eagle3"]["optim"]["lr"] == 3e-3
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["versions"]["torch"]
    assert len(provenance["training data"]) == 16

    assert "next: python eval/speedup.py runs/tiny-eagle3/export" in script(
        "export/checkpoint.py", str(Path("runs/tiny-eagle3")), cwd=answered
    )
    offline = script("eval/acceptance.py", "runs/tiny-eagle3", "--num-drafts", "2", cwd=answered)
    assert "k = 2: acceptance length" in offline

    words = (
        "runs/tiny-eagle3/export",
        "--num-drafts",
        "2",
        "--concurrency",
        "1",
        "2",
        "--prompts",
        "4",
        "--repeats",
        "2",
    )
    script("eval/speedup.py", *words, cwd=answered)
    report = json.loads((run / "report" / "report.json").read_text())
    assert [(row["num_speculative_tokens"], row["concurrency"]) for row in report["runs"]] == [(0, 1), (2, 1), (0, 2), (2, 2)]
    for row in report["runs"]:
        assert row["greedy_identical_share"] == 1.0
        assert row["ms_per_token"]["low"] > 0
        assert row["speedup"]["low"] <= row["speedup"]["median"] <= row["speedup"]["high"]
    (compared,) = report["offline"]
    assert compared["acceptance_length"] == pytest.approx(compared["served_acceptance_length"], rel=1e-9)
    assert "## Served" in (run / "export" / "README.md").read_text()
    again = script("eval/speedup.py", *words, cwd=answered)
    assert "token for token" in again
    assert "served passes" not in again


@pytest.mark.vllm
def test_synthesised_prompts(tmp_path: Path, tiny_target: Path) -> None:
    """The target writes its own prompts, each from a seed of its own; started again, it has nothing to do."""
    (tmp_path / "chat.yaml").write_text(
        f"name: chat\ntarget: {{model: {tiny_target}, dtype: float32}}\n"
        "data: {max_length: 80, synthesis: {num_prompts: 6, sampling: {temperature: 1.0, max_tokens: 20}}}\n"
    )
    shown = script("data/synthesize.py", "chat.yaml", cwd=tmp_path)
    assert "of 6 synthesised prompts kept" in shown
    rows = [json.loads(line) for line in (tmp_path / "runs/chat-data/synthesised.jsonl").read_text().splitlines()]
    assert sorted(row["key"] for row in rows) == [f"prompt-{i:07d}" for i in range(6)]
    assert len({row["text"] for row in rows}) > 1
    before = (tmp_path / "runs/chat-data/synthesised.jsonl").stat().st_mtime_ns
    script("data/synthesize.py", "chat.yaml", cwd=tmp_path)
    assert (tmp_path / "runs/chat-data/synthesised.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("template", "header", "stop"),
    [
        (None, "<|im_start|>user\n", [2]),
        # The turn ends in text: nothing is known to stop at.
        ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}", "user: ", []),
    ],
)
def test_where_a_synthesised_prompt_begins_and_ends(template: str | None, header: str, stop: list[int]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    found, ends = user_header(Chat(tokenizer, {0}))
    assert tokenizer.decode(found) == header
    assert ends == stop


@pytest.mark.vllm
def test_synthesis_stops_where_the_users_turn_ends() -> None:
    """The token behind it is no end-of-sequence token of this target; vLLM is told to stop there all the same."""
    asked = []
    llm_engine = SimpleNamespace(add_request=lambda _, prompt, params: asked.append((prompt, params)), step=lambda: 1 / 0)
    dialogues = [Asking("k", write([1, 70]))]
    with pytest.raises(ZeroDivisionError):
        list(generate(SimpleNamespace(llm_engine=llm_engine), dialogues, SamplingConfig(), max_length=80, seed=0, stop=[7]))
    ((prompt, params),) = asked
    assert prompt["prompt_token_ids"] == [1, 70]
    assert params.stop_token_ids == [7]
    assert params.max_tokens == 78


def test_which_synthesised_prompts_are_kept() -> None:
    chosen = Filter(SynthesisConfig(max_words=30))
    assert chosen.keep("1", "How do I\nboil rice in a pot on the stove?", "stop")
    assert not chosen.keep("2", "How do I boil", "length")
    assert not chosen.keep("3", "Hello there", "stop")
    assert not chosen.keep("4", "a b c \x00", "stop")
    assert not chosen.keep("5", "word " * 31, "stop")
    assert not chosen.keep("6", "Wie koche ich Reis in einem Topf auf dem Herd?", "stop")
    assert not chosen.keep("7", "how do i boil rice in a pot on the stove", "stop")
    assert chosen.keep("8", "What is the capital of the largest country in Africa?", "stop")
    assert chosen.reasons["nearly the same as one before"] == 1
    assert Filter(SynthesisConfig(language=None)).keep("1", "Wie koche ich Reis in einem Topf auf dem Herd?", "stop")


def test_distinct_by_hand() -> None:
    """a b a, a b: words a b a a b are 2 of 5; pairs ab ba ab are 2 of 3."""
    assert distinct(["a b a", "A b"], 1) == 2 / 5
    assert distinct(["a b a", "A b"], 2) == 2 / 3
    assert distinct([], 2) == 0.0


def test_mistakes_cost_one_line(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 2, one line that names key, value and fix, nothing written."""
    folder = make_workplace(tmp_path, tiny_target)
    bare = make_target(tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    write_jsonl(folder / "empty.jsonl", [])
    cases = [
        (("train/eagle3.py", "gone.yaml"), "recipe gone.yaml does not exist"),
        (("train/eagle3.py", "tiny.yaml", "eagle3.optim.lrr=1"), "unknown key eagle3.optim.lrr; did you mean eagle3.optim.lr?"),
        (("train/eagle3.py", "tiny.yaml", "eagle3.drafter.aux_layers=[2, 40]"), "aux_layers has 40, but"),
        (("train/eagle3.py", "tiny.yaml", f"target.model={bare}"), "has no chat template; use an instruction-tuned model"),
        (("train/eagle3.py", "tiny.yaml"), "answers.jsonl does not exist; make it with: python data/regenerate.py"),
        (("train/eagle3.py", "tiny.yaml", "target.model=/no/such/folder"), "is neither a local folder nor"),
        (("data/regenerate.py", "tiny.yaml", f"data.prompts={folder / 'empty.jsonl'}"), "empty.jsonl: no prompts"),
        (("data/regenerate.py", "tiny.yaml", f"data.prompts={folder / 'gone.jsonl'}"), "gone.jsonl does not exist"),
        (("eval/acceptance.py", "runs/nothing"), "runs/nothing is not a run folder"),
        (("eval/speedup.py", str(folder)), "is not a native export; make one with: python export/checkpoint.py"),
    ]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for (name, *words), message in cases:
        main = importlib.import_module(name.removesuffix(".py").replace("/", ".")).main
        refused = call_script(main, *words, cwd=folder, expect=2)
        errors = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, refused.stderr
        assert message in errors[0]
        assert "Traceback" not in refused.stderr
    assert not (folder / "runs").exists()


def test_a_mistake_under_the_launcher(tmp_path: Path, tiny_target: Path) -> None:
    """accelerate launch passes our line on; --quiet keeps its own traceback out. Its exit status is 1, whatever ours was."""
    folder = make_workplace(tmp_path, tiny_target)
    launch = ("-m", "accelerate.commands.launch", "--quiet", str(ROOT / "train" / "eagle3.py"), "tiny.yaml", "eagle3.optim.lrr=1")
    refused = run_script(*launch, cwd=folder, expect=1)
    assert "error: unknown key eagle3.optim.lrr; did you mean eagle3.optim.lr?" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_plan_of_a_target_that_is_not_here(tmp_path: Path) -> None:
    """Llama-3.3-70B from its config alone: 70.55 billion parameters, and an EAGLE-3 drafter that fits beside it in 192 GB.

    Drafter by hand: fc 3 * 8192^2, attention 16384 * (8192 + 2 * 1024) + 8192^2, MLP 3 * 8192 * 28672, head 32000 * 8192,
    five norms of 8192.
    """
    shown = script("train/eagle3.py", str(ROOT / "recipes" / "llama70b.yaml"), "--plan", cwd=tmp_path, HF_HUB_OFFLINE="1")
    width = 8192
    drafter = 3 * width**2 + 2 * width * (width + 2048) + width**2 + 3 * width * 28672 + 32000 * width + 5 * width
    assert f"{drafter / 1e9:9.3f} billion" in shown
    assert "70.554 billion" in shown
    total = float(next(line for line in shown.splitlines() if line.startswith("sum, of one process")).split()[-2])
    assert 131.4 < total < 178.8  # the target's weights alone; 192 GB in GiB
