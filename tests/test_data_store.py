"""Features on disk: what is read is what was written, whoever wrote it and however often it was killed."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from data import capture
from data.batch import Document
from data.chat import Chat
from data.conversations import DataConfig
from data.documents import open_documents
from data.store import StoredTeacher, StoreWriter, places, save_frozen
from data.target import target_fingerprint
from data.teacher import Features, OnlineTeacher
from data.vllm_features import drop_scratch
from recipes.load import RecipeError, build
from tests.conftest import ROOT, call_script, write_random_answers
from tests.forks import fork_script

LAYERS = (2, 4, 5)
MADE_BY = {"target": "t", "dtype": "float32", "aux_layers": list(LAYERS), "logits": {"scale": 1.0, "soft_cap": None}}


@pytest.fixture(scope="module")
def teacher(tiny_target: Path) -> OnlineTeacher:
    return OnlineTeacher(AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32), LAYERS)


def documents(count: int) -> list[Document]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        tokens = torch.randint(3, 120, (5 + i % 9,), generator=generator)
        found.append(Document(f"d{i}", tokens, torch.arange(len(tokens)) > 2))
    return found


def stored(folder: Path, layers: tuple[int, ...] = LAYERS, target: str = "t") -> StoredTeacher:
    return StoredTeacher(folder, layers, target=target, dtype="float32", device=torch.device("cpu"))


def test_read_is_what_was_written(tmp_path: Path, teacher: OnlineTeacher, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two writers, several shards each; all fields of a batch bit for bit; layers in another number; head and embedding."""
    monkeypatch.setattr("data.store.SHARD_BYTES", 30 * 1544)
    docs = documents(20)
    for name, mine in (("a", docs[:11]), ("b", docs[11:])):
        writer = StoreWriter(tmp_path, name, MADE_BY)
        for i in range(0, len(mine), 4):
            writer.add(mine[i : i + 4], teacher.features(mine[i : i + 4]))
        writer.flush()
    save_frozen(tmp_path, "a", teacher.model)
    assert len(list(tmp_path.glob("a-*.safetensors"))) > 1
    groups = [docs[start:end] for start, end in ((0, 4), (4, 8), (8, 11), (11, 15), (15, 19), (19, 20))]
    found = stored(tmp_path)
    found.expect(docs[:7])
    for group in groups:
        read, computed = found.batch([group[:1], group], [3, 5]), teacher.batch([group[:1], group], [3, 5])
        torch.testing.assert_close(vars(read.text), vars(computed.text), rtol=0, atol=0)
        for name, tensor in zip(computed._fields[1:], computed[1:], strict=True):
            # Of states, which were computed beside other documents, to the rounding of fp32 (the largest are some 50).
            near = 1e-5 * float(tensor.abs().max()) if "hidden" in name else 0
            torch.testing.assert_close(getattr(read, name), tensor, rtol=0, atol=near)
    whole, some = stored(tmp_path).features(docs), stored(tmp_path, (4,)).features(docs)
    for one, other in zip(whole, some, strict=True):
        assert torch.equal(one.aux_hidden_TAD[:, 1:2], other.aux_hidden_TAD)
    hidden = torch.randn(3, 96)
    assert torch.equal(found.head.logits(hidden), teacher.head.logits(hidden))
    assert torch.equal(found.embedding_VH, teacher.model.get_input_embeddings().weight)


def test_a_store_of_something_else_is_refused(tmp_path: Path, teacher: OnlineTeacher) -> None:
    docs = documents(3)
    writer = StoreWriter(tmp_path, "a", MADE_BY)
    writer.add(docs[:2], teacher.features(docs[:2]))
    writer.flush()
    save_frozen(tmp_path, "a", teacher.model)
    with pytest.raises(RecipeError, match=r"has target t, but this recipe has u; give another folder"):
        stored(tmp_path, target="u")
    with pytest.raises(RecipeError, match=r"has layers \[2, 4, 5\], not \[6\]; make another with: .* --aux-layers 2 6"):
        stored(tmp_path, (2, 6))
    with pytest.raises(RecipeError, match=r"lacks 1 documents of this recipe, d2 for one; go on with: .* --out"):
        stored(tmp_path).require(docs)
    with pytest.raises(RecipeError, match="lacks 1 documents of this recipe, d0 for one"):
        stored(tmp_path).features([docs[0]._replace(tokens_T=docs[0].tokens_T + 1)])
    with pytest.raises(RecipeError, match="no store of features"):
        stored(tmp_path / "none")
    with pytest.raises(RecipeError, match="has dtype float32, but this recipe has bfloat16"):
        StoreWriter(tmp_path, "b", {**MADE_BY, "dtype": "bfloat16"})


def test_what_cannot_be_right_is_not_written(tmp_path: Path, teacher: OnlineTeacher) -> None:
    """What an engine with a wrong hook gives: zeros, no numbers, one layer twice."""
    (doc,) = documents(1)
    (right,) = teacher.features([doc])
    aux = right.aux_hidden_TAD
    for wrong, message in (
        (right._replace(aux_hidden_TAD=aux * torch.tensor([1.0, 0.0, 1.0])[:, None]), "aux layer 1 of document d0 is all zero"),
        (right._replace(aux_hidden_TAD=aux[:, [0, 1, 0]]), "aux layer 2 of document d0 is that of aux layer 0"),
        (right._replace(last_hidden_TD=right.last_hidden_TD / 0), "the last hidden state of document d0 is not finite"),
        (right._replace(argmax_T=right.argmax_T[1:]), r"engine gave \[5, 5, 4\] states of the 5 tokens of d0"),
    ):
        with pytest.raises(RecipeError, match=message):
            StoreWriter(tmp_path / message[-9:], "a", MADE_BY).add([doc], [Features(*wrong)])


def test_one_process_writes_under_a_name(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, "a", MADE_BY)
    with pytest.raises(RecipeError, match=r"another process writes .*a\.jsonl at this moment"):
        StoreWriter(tmp_path, "a", MADE_BY)
    StoreWriter(tmp_path, "b", MADE_BY)
    writer.close()
    StoreWriter(tmp_path, "a", MADE_BY)


def test_what_is_listed_is_never_written_over(tmp_path: Path, teacher: OnlineTeacher) -> None:
    """Documents that stand in a store twice, as those of a group do that has a new one: a listed shard stays as it is."""
    docs = documents(6)
    for mine in (docs[:3], docs[:4], docs[:4], docs[4:]):
        writer = StoreWriter(tmp_path, "a", MADE_BY)
        writer.add(mine, teacher.features(mine))
        writer.close()
    save_frozen(tmp_path, "a", teacher.model)
    assert len(list(tmp_path.glob("a-*.safetensors"))) == 4
    same_as_computed(stored(tmp_path), teacher, docs)


def same_as_computed(found: StoredTeacher, teacher: OnlineTeacher, docs: list[Document]) -> None:
    found.require(docs)
    for read, computed in zip(found.features(docs), teacher.features(docs), strict=True):
        for one, other in zip(read, computed, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


RECIPE = """
name: tiny
target: {{model: {target}, dtype: float32}}
data: {{max_length: 40, test_share: 0.1, validation_share: 0.2}}
eagle3:
  drafter: {{draft_vocab_size: 100, num_steps: 2}}
  optim: {{lr: 1e-3, epochs: 3}}
train: {{row_tokens: 64, rows_per_step: 4, rows_per_device: 4, validations: 2, log_every: 1, cpu_threads: 1, feature_cache_gib: 1}}
"""


def make_workplace(folder: Path, target: Path, count: int) -> Path:
    (folder / "tiny.yaml").write_text(RECIPE.format(target=target))
    write_random_answers(folder, count)
    return folder


def test_training_from_a_store_is_training_beside_the_target(tmp_path: Path, tiny_target: Path) -> None:
    """Written by two parts; the loss curve and the weights bit for bit those of a run that keeps all features in memory."""
    make_workplace(tmp_path, tiny_target, 40)
    shown = call_script(capture.main, "tiny.yaml", "--part", "0/2", cwd=tmp_path).stdout
    assert "tokens to do in all, 1.5 KiB each" in shown
    refused = call_script(capture.main, "tiny.yaml", "--part", "1/2", "--limit-gib", "0.0001", cwd=tmp_path, expect=2).stderr
    assert "GiB more, over the limit of 0.00; give --out on a larger disk" in refused
    call_script(capture.main, "tiny.yaml", "--part", "1/2", cwd=tmp_path)
    assert "0 tokens to do in all" in call_script(capture.main, "tiny.yaml", "--part", "1/2", cwd=tmp_path).stdout
    script = str(ROOT / "train" / "eagle3.py")
    fork_script(script, "tiny.yaml", cwd=tmp_path)
    fork_script(script, "tiny.yaml", "train.features=runs/tiny-data/features", "train.tag=stored", cwd=tmp_path)
    curves = []
    for tag in ("", "-stored"):
        rows = [json.loads(line) for line in (tmp_path / "runs" / f"tiny-eagle3{tag}" / "metrics.jsonl").read_text().splitlines()]
        curves.append([(row["step"], row.get("loss"), row.get("validation/acceptance_length")) for row in rows])
    assert curves[0] == curves[1]
    one, other = (
        load_file(max((tmp_path / "runs" / f"tiny-eagle3{tag}" / "checkpoints").glob("step-*")) / "drafter.safetensors")
        for tag in ("", "-stored")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    refused = call_script(capture.main, "tiny.yaml", "--aux-layers", "1", "2", cwd=tmp_path, expect=2).stderr
    assert "runs/tiny-data/features has aux_layers [2, 4, 5], but this recipe has [1, 2]; give another folder" in refused


def test_a_killed_capture_goes_on(
    tmp_path: Path, tiny_target: Path, teacher: OnlineTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 after the first shards, and a listing cut short: in the end every document is there as it should be."""
    make_workplace(tmp_path, tiny_target, 300)
    code = (
        "import sys, time, data.store, data.capture, recipes.load as r; data.store.SHARD_BYTES = 200 * 1544;"
        "flush = data.store.StoreWriter.flush; data.store.StoreWriter.flush = lambda self: (flush(self), time.sleep(0.2));"
        "sys.argv = ['x', 'tiny.yaml']; r.run_script(data.capture.main)"
    )
    folder = tmp_path / "runs" / "tiny-data" / "features"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and len(list(folder.glob("0-of-1-*"))) < 3:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -9, "it was to be killed before its end"
    index = folder / "0-of-1.jsonl"
    index.write_bytes(index.read_bytes()[:-7])
    before = len(places(folder))
    assert 0 < before < 200
    call_script(capture.main, "tiny.yaml", cwd=tmp_path)
    assert "0 tokens to do in all" in call_script(capture.main, "tiny.yaml", cwd=tmp_path).stdout
    assert len(places(folder)) > before
    data = build(DataConfig, yaml.safe_load((tmp_path / "tiny.yaml").read_text())["data"], "data")
    monkeypatch.chdir(tmp_path)
    target = target_fingerprint(tiny_target)
    found = open_documents(data, "tiny", chat=Chat.load(tiny_target), target=target)
    same_as_computed(stored(folder, target=target), teacher, [*found.split("train"), *found.split("validation")])


def test_only_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    """Of this machine's processes, by their number; not of another's, whose name may begin like this one's."""
    node, gone = platform.node(), subprocess.Popen(["true"])
    gone.wait()
    kept = [
        f".scratch-{node}-{os.getpid()}-a_1",
        f".scratch-{node}-x-{gone.pid}-ab",
        f".scratch-{node}-1-{gone.pid}-ab",
        ".scratch-z-9-ab",
    ]
    for name in (*kept, f".scratch-{node}-{gone.pid}-ab"):
        (tmp_path / name).mkdir()
    drop_scratch(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
