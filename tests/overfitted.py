"""Drafters that know a few answers by heart, and what vLLM's drafts of theirs must be."""

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

import export.checkpoint
from data.batch import Document
from data.target import TargetConfig
from data.target_model import load_target, target_model_config
from data.teacher import OnlineTeacher
from data.vocabulary import build_vocabulary, vocabulary_text
from drafters.dflash import DFlashConfig, DFlashDrafter
from drafters.drafter import Drafter, FrozenTarget
from drafters.dspark import DSparkConfig, DSparkDrafter
from drafters.eagle3 import Eagle3Config, Eagle3Drafter
from drafters.layers import DrafterShape
from drafters.saved import Description, describe, read_saved, rebuild
from recipes.load import to_plain
from tests.conftest import call_script
from train.loop import OptimConfig, TrainConfig, fit

Config = Eagle3Config | DFlashConfig | DSparkConfig
Drafters: dict[type, tuple[str, Any]] = {
    Eagle3Config: ("eagle3", Eagle3Drafter),
    DFlashConfig: ("dflash", DFlashDrafter),
    DSparkConfig: ("dspark", DSparkDrafter),
}


def overfit(
    folder: Path, target: Path, answers: list[tuple[list[int], list[int]]], *, config: Config, steps: int, lr: float
) -> Path:
    """A run folder whose drafter has seen little else than these (prompt, greedy answer) pairs; exported. Returns the run."""
    docs = [
        Document(str(i), torch.tensor(prompt + answer), torch.arange(len(prompt + answer)) >= len(prompt))
        for i, (prompt, answer) in enumerate(answers)
    ]
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(2)
    model = load_target(target, TargetConfig(str(target), dtype="float32"), accelerator.device)
    assert config.aux_layers is not None
    teacher = OnlineTeacher(model, config.aux_layers)
    shape = DrafterShape.of(target_model_config(target))
    made_from = {"target": "overfitted", "training data": "overfitted"}
    vocabulary = build_vocabulary(docs, size=config.draft_vocab_size, vocab_size=shape.vocab_size, always={2}, made_from=made_from)
    method, drafter_class = Drafters[type(config)]
    folder.mkdir()
    description = Description(method, target, str(target), "float32", shape, to_plain(config))
    (folder / "drafter.json").write_text(describe(description))
    (folder / "vocabulary.json").write_text(vocabulary_text(vocabulary))
    (folder / "provenance.json").write_text('{"versions": {}}')
    torch.manual_seed(0)
    drafter: Drafter = drafter_class(shape, config, kept_W=vocabulary.kept_W, target=FrozenTarget.of(model))
    fit(
        accelerator,
        drafter,
        teacher,
        folder=folder,
        train_docs=docs,
        validation_docs=docs,
        optim=OptimConfig(lr=lr, epochs=steps),
        train=TrainConfig(
            row_tokens=sum(len(d.tokens_T) for d in docs), rows_per_step=1, feature_cache_gib=1.0, validations=1, log_every=1000
        ),
    )
    call_script(export.checkpoint.main, str(folder), cwd=folder)
    return folder


def speculative(run: Path, k: int) -> dict[str, Any]:
    """The exported speculative_config.json with k drafts per pass."""
    config: dict[str, Any] = json.loads((run / "export" / "speculative_config.json").read_text())
    return {**config, "num_speculative_tokens": k}


def assert_drafts_equal(run: Path, proposals: list[tuple[list[int], list[int]]]) -> None:
    """Every draft token vLLM proposed is the one draft(), the plain decode, proposes behind the same prefix."""
    saved = read_saved(run)
    model = load_target(saved.description.target, TargetConfig("x", dtype="float32"), torch.device("cpu"))
    teacher = OnlineTeacher(model, saved.description.aux_layers)
    drafter: Any = rebuild(saved, FrozenTarget.of(model))
    assert proposals
    for prefix, drafts in proposals:
        tokens = torch.tensor(prefix[:-1])
        (features,) = teacher.features([Document("", tokens, torch.zeros(len(tokens), dtype=torch.bool))])
        assert drafter.draft(prefix, features.aux_hidden_TAD, num_drafts=len(drafts)) == drafts, f"behind {len(prefix)} tokens"


def random_prompts(count: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(8, 20, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
