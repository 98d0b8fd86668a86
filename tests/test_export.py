"""Exported folders: every tensor and switch survives, both formats say the same, bad folders are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import export.checkpoint
from drafters.dflash import DFlashConfig, DFlashDrafter
from drafters.dspark import DSparkConfig, DSparkDrafter
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
    assert "| acceptance length of its greedy drafts on the validation answers, offline | 2.500 |" in card
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
    assert "has no validated checkpoint yet; train it first" in export_run(run, expect=2).stderr


@pytest.mark.parametrize("count", ["0", "-1"])
def test_bad_number_of_drafts(tmp_path: Path, count: str) -> None:
    run = make_run(tmp_path / "r-eagle3")
    assert "give 1 or more" in export_run(run, "--num-speculative-tokens", count, expect=2).stderr


def make_block_run(folder: Path, method: str, **config: Any) -> Path:
    """A run folder of a block drafter with random weights at step 7."""
    (folder / "checkpoints" / "step-000007").mkdir(parents=True)
    common: dict[str, Any] = {"num_layers": 2, "block_size": 5, "aux_layers": (1, 4, 8), "mask_token_id": 99, **config}
    common = {"draft_vocab_size": len(KEPT), **common}
    kept = KEPT if common["draft_vocab_size"] else torch.arange(100)
    settings: DFlashConfig | DSparkConfig
    drafter: DFlashDrafter | DSparkDrafter
    if method == "dflash":
        settings = DFlashConfig(**common)
        drafter = DFlashDrafter(SHAPE, settings, kept_W=kept)
    else:
        settings = DSparkConfig(markov_rank=8, **common)
        drafter = DSparkDrafter(SHAPE, settings, kept_W=kept)
    save_file(dict(drafter.state_dict()), folder / "checkpoints" / "step-000007" / "drafter.safetensors")
    (folder / "checkpoints" / "step-000007" / "progress.json").write_text(json.dumps({"acceptance_length": 2.5}))
    (folder / "drafter.json").write_text(
        describe(Description(method, Path("/target"), "org/target", "float32", SHAPE, to_plain(settings)))
    )
    (folder / "vocabulary.json").write_text(json.dumps({"kept_W": kept.tolist(), "coverage": 0.9, "made_from": {}}))
    (folder / "provenance.json").write_text(json.dumps({"versions": {"torch": "2"}}))
    return folder


def test_dflash_export(tmp_path: Path) -> None:
    """Taps in both countings (theirs are one less), causality at both places, the mask embedding in its file, four drafts of a
    block of five; the target's frozen head and embedding stay out."""
    run = make_block_run(tmp_path / "r", "dflash", draft_vocab_size=None, own_mask_embedding=True, causal=True, sliding_window=6)
    export_run(run)
    config = json.loads((run / "export" / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "draft_vocab_size": 100,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 8],
        "num_aux_hidden_states": 3,
        "is_causal": True,
        "block_size": 5,
        "dflash_config": {
            "mask_token_id": 99,
            "target_layer_ids": [0, 3, 7],
            "causal": True,
            "sample_from_anchor": False,
            "use_swa": True,
            "swa_window_size": 6,
        },
    }
    assert {key: config[key] for key in expected} == expected
    names = set(load_file(run / "export" / "model.safetensors"))
    assert not names & {"lm_head.weight", "embed_tokens.weight", "d2t", "mask_embedding"}
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"} <= names
    mask = torch.load(run / "export" / "mask_embedding.pt", weights_only=True)
    assert mask["mask_token_id"] == 99
    assert mask["embedding"].shape == (32,)
    assert json.loads((run / "export" / "speculative_config.json").read_text())["num_speculative_tokens"] == 4
    refused = export_run(run, "--format", "speculators", expect=2)
    assert "vLLM 0.32 reads no sliding_window from the speculators format; use --format native" in refused.stderr


def test_dspark_export(tmp_path: Path) -> None:
    """Sampled from the anchor on, five drafts of a block of five; both heads, the confidence's scaled by 1 / 2 and shifted by 3."""
    run = make_block_run(tmp_path / "r", "dspark")
    of_all = {"temperature": 2.0, "shift": 3.0}
    of_each = [{"temperature": 1.5, "shift": 0.0}, {"temperature": 2.5, "shift": 0.5}]
    (run / "calibration.json").write_text(json.dumps({"step": 7, "of_all": of_all, "of_each": of_each}))
    for words, folder in (((), "export"), (("--format", "speculators"), "export-speculators")):
        export_run(run, *words)
        config = json.loads((run / folder / "config.json").read_text())
        expected = {
            "mask_token_id": 99,
            "block_size": 5,
            "sample_from_anchor": True,
            "markov_rank": 8,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "confidence_scalings": of_each,
        }
        assert {key: config[key] for key in expected} == expected
        tensors = load_file(run / folder / "model.safetensors")
        assert tensors["markov_head.markov_w1.weight"].shape == (100, 8)
        assert tensors["markov_head.markov_w2.weight"].shape == (len(KEPT), 8)
        trained = load_file(run / "checkpoints" / "step-000007" / "drafter.safetensors")
        assert torch.equal(tensors["confidence_head.proj.weight"], trained["confidence_head.proj.weight"] / 2)
        assert torch.equal(tensors["confidence_head.proj.bias"], trained["confidence_head.proj.bias"] / 2 + 3)
        assert {"lm_head.weight", "d2t"} <= tensors.keys()
    native = json.loads((run / "export" / "config.json").read_text())
    assert native["architectures"] == ["Qwen3DSparkModel"]
    assert native["target_layer_ids"] == [0, 3, 7]
    assert native["is_causal"] is False
    assert json.loads((run / "export" / "speculative_config.json").read_text())["num_speculative_tokens"] == 5
    (run / "calibration.json").write_text(json.dumps({"step": 7, "of_all": {"temperature": 4.0, "shift": 0.0}, "of_each": []}))
    assert "up to date" not in export_run(run).stdout


def test_what_vllm_cannot_serve_is_refused(tmp_path: Path) -> None:
    for method, config, words, message in (
        ("dspark", {"sliding_window": 9}, (), "vLLM 0.32 serves dspark without sliding windows only"),
        ("dspark", {"causal": True}, ("--format", "speculators"), "not known to read a causal switch from dspark's"),
        ("dflash", {"aux_layers": (0, 4)}, (), "aux_layers has 0, the embeddings, which this format cannot name"),
    ):
        run = make_block_run(tmp_path / message[:20].replace(" ", "-"), method, **config)
        assert message in export_run(run, *words, expect=2).stderr
        assert not (run / "export").exists()
