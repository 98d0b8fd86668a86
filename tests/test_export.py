"""Exported folders: every tensor and switch survives, both formats say the same, bad folders are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import export.checkpoint
from drafters.eagle3 import Eagle3Config, Eagle3Drafter
from drafters.layers import DrafterShape
from drafters.saved import Description, describe
from recipes.load import to_plain
from tests.conftest import call_script

ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHAPE = DrafterShape(32, 48, 4, 2, 16, 100, 8, 256, 1e-5, {**ROPE, "original_max_position_embeddings": 64})
KEPT = torch.arange(0, 100, 3)


def make_run(folder: Path, **config: Any) -> Path:
    """A run folder as training leaves it, with random weights at step 7."""
    (folder / "checkpoints" / "step-000007").mkdir(parents=True)
    settings = Eagle3Config(aux_layers=(1, 2, 5, 8), draft_vocab_size=len(KEPT), num_steps=2, **config)
    torch.manual_seed(0)
    drafter = Eagle3Drafter(SHAPE, settings, kept_W=KEPT)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter)
    save_file(dict(drafter.state_dict()), folder / "checkpoints" / "step-000007" / "drafter.safetensors")
    (folder / "checkpoints" / "step-000007" / "progress.json").write_text(json.dumps({"acceptance_length": 2.5}))
    described = Description("eagle3", Path("/target"), "org/target", "float32", SHAPE, to_plain(settings))
    (folder / "drafter.json").write_text(describe(described))
    (folder / "vocabulary.json").write_text(json.dumps({"kept_W": KEPT.tolist(), "coverage": 0.9, "made_from": {}}))
    (folder / "provenance.json").write_text(json.dumps({"versions": {"torch": "2"}}))
    return folder


def export_run(run: Path, *words: str, expect: int = 0) -> Any:
    return call_script(export.checkpoint.main, str(run), *words, cwd=run.parent, expect=expect)


def test_native_export(tmp_path: Path) -> None:
    """Tensors by vLLM's names, bit for bit; offsets in d2t; every switch and size in config.json; the next commands printed."""
    run = make_run(tmp_path / "r-eagle3", fc_norm=True, norm_before_residual=False)
    shown = export_run(run)
    assert "vllm serve org/target --speculative-config" in shown.stdout
    assert "next: python eval/speedup.py" in shown.stdout
    tensors = load_file(run / "export" / "model.safetensors")
    trained = load_file(run / "checkpoints" / "step-000007" / "drafter.safetensors")
    assert tensors.keys() == trained.keys() | {"d2t", "t2d"}
    assert all(torch.equal(tensors[name], weight) for name, weight in trained.items())
    assert (torch.arange(len(KEPT)) + tensors["d2t"]).tolist() == KEPT.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == KEPT.tolist()
    config = json.loads((run / "export" / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 32,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": 100,
        "draft_vocab_size": len(KEPT),
        "target_hidden_size": 32,
        "num_aux_hidden_states": 4,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 5, 8],
        "norm_before_residual": False,
        "fc_norm": True,
        "norm_output": False,
        "norm_before_fc": False,
        "rope_theta": 5e5,
        "rope_parameters": dict(SHAPE.rope_parameters),
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    assert {key: config[key] for key in expected} == expected
    speculative = json.loads((run / "export" / "speculative_config.json").read_text())
    assert speculative == {"method": "eagle3", "model": str(run / "export"), "num_speculative_tokens": 2}
    card = (run / "export" / "README.md").read_text()
    assert "| acceptance length of its greedy drafts on held-out answers, offline | 2.500 |" in card
    assert "vllm serve org/target --speculative-config" in card


def test_speculators_export_says_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r-eagle3")
    export_run(run)
    export_run(run, "--format", "speculators", "--num-speculative-tokens", "5", "--dtype", "bfloat16")
    native = json.loads((run / "export" / "config.json").read_text())
    other = json.loads((run / "export-speculators" / "config.json").read_text())
    layer = other["transformer_layer_config"]
    assert {key: layer[key] for key in layer if key not in ("dtype", "torch_dtype")} == {
        key: native[key] for key in layer if key not in ("dtype", "torch_dtype")
    }
    for key in ("norm_before_residual", "fc_norm", "norm_output", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids"):
        assert other[key] == native[key]
    assert other["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert other["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    tensors = load_file(run / "export-speculators" / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in tensors
    assert tensors["fc.weight"].dtype == torch.bfloat16


def test_a_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r-eagle3")
    (run / "vocabulary.json").write_text(json.dumps({"kept_W": list(range(100)), "coverage": 1.0, "made_from": {}}))
    export_run(run)
    assert not {"d2t", "t2d"} & load_file(run / "export" / "model.safetensors").keys()


def test_done_work_is_not_done_again_and_a_new_checkpoint_is(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r-eagle3")
    export_run(run)
    before = (run / "export" / "model.safetensors").stat().st_mtime_ns
    assert "is up to date" in export_run(run).stdout
    assert (run / "export" / "model.safetensors").stat().st_mtime_ns == before
    (run / "checkpoints" / "step-000007").rename(run / "checkpoints" / "step-000009")
    assert "step 9" in export_run(run).stdout
    assert json.loads((run / "export" / "export.json").read_text())["step"] == 9


def test_bad_folders(tmp_path: Path) -> None:
    """One line, the fix, status 2, nothing overwritten."""
    (tmp_path / "empty").mkdir()
    for folder, message in (
        ("empty", "empty is not a run folder (no drafter.json); give one that training made"),
        ("nowhere", "nowhere is not a run folder"),
    ):
        refused = export_run(tmp_path / folder, expect=2)
        assert refused.stderr.startswith("error: ")
        assert message in refused.stderr
        assert refused.stderr.count("\n") == 1
    run = make_run(tmp_path / "r-eagle3")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    refused = export_run(run, "--output", str(tmp_path / "mine"), expect=2)
    assert "mine exists and is not an export of ours; give --output another folder" in refused.stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    (run / "checkpoints" / "step-000007" / "progress.json").unlink()
    assert "has no checkpoint yet; train it first" in export_run(run, expect=2).stderr


@pytest.mark.parametrize("count", ["0", "-1"])
def test_bad_number_of_drafts(tmp_path: Path, count: str) -> None:
    run = make_run(tmp_path / "r-eagle3")
    assert "give 1 or more" in export_run(run, "--num-speculative-tokens", count, expect=2).stderr
