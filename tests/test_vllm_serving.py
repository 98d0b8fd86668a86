"""What vLLM itself does with an exported drafter: the overfit gate, parity token by token, losslessness.

Each engine runs in a process of its own (tests/vllm_cpu/capture.py); answers and drafts come back as token ids.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import export.checkpoint
from data.chat import Chat
from data.target import TargetConfig
from data.target_model import load_target
from drafters.dflash import DFlashConfig
from drafters.dspark import DSparkConfig, DSparkDrafter
from drafters.eagle3 import Eagle3Config
from drafters.saved import read_saved, rebuild
from eval.acceptance import offline_acceptance
from tests.conftest import call_script
from tests.overfitted import Config, assert_drafts_equal, overfit, random_prompts, speculative
from tests.vllm_cpu.capture import Group, serve

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> dict[str, Any]:
    """The tiny target's own answers, a drafter overfitted on the first six, and what vLLM makes of both."""
    folder = tmp_path_factory.mktemp("served")
    prompts = random_prompts(10, 320)
    sampled = Group([prompts[0]] * 4000, max_tokens=3, temperature=0.4)
    greedy = Group(prompts, max_tokens=48)
    alone, alone_sampled = serve(folder / "alone", tiny_target, [greedy, sampled], speculative=None)
    answers = list(zip(prompts, alone.answers, strict=True))
    config = Eagle3Config(aux_layers=(2, 4, 5), draft_vocab_size=200, num_steps=3)
    run = overfit(folder / "run", tiny_target, answers[:6], config=config, steps=250, lr=3e-3)
    one_by_one = Group(prompts[:6], max_tokens=48, one_by_one=True)
    strangers = Group(prompts[6:], max_tokens=48, one_by_one=True)
    own, strange, together, drafted_sampled = serve(
        folder / "drafted", tiny_target, [one_by_one, strangers, greedy, sampled], speculative=speculative(run, 3)
    )
    return {
        "answers": answers,
        "run": run,
        "own": own,
        "strange": strange,
        "together": together,
        "sampled": (prompts[0], alone_sampled, drafted_sampled),
    }


def test_overfit_gate(tiny: dict[str, Any]) -> None:
    """Served, a drafter that knows the answers gets at least 90 % of the largest acceptance length, K + 1.

    The target's width is not heads x head size; grouped heads, an untied head, 200 of 320 tokens in the draft vocabulary.
    """
    assert tiny["own"].acceptance.length >= 0.9 * 4, tiny["own"].acceptance


def test_drafts_equal_the_plain_decode(tiny: dict[str, Any]) -> None:
    """Position by position, on answers it knows (all accepted) and on those it doesn't (most rejected)."""
    assert tiny["strange"].acceptance.length < 3
    assert_drafts_equal(tiny["run"], tiny["own"].proposals)
    assert_drafts_equal(tiny["run"], tiny["strange"].proposals)


def test_offline_acceptance_is_what_vllm_counts(tiny: dict[str, Any]) -> None:
    """PyTorch's replay gives vLLM's counters exactly, at each position."""
    for part, served in (((0, 6), tiny["own"]), ((6, 10), tiny["strange"]), ((0, 10), tiny["together"])):
        predicted = offline_acceptance(read_saved(tiny["run"]), tiny["answers"][slice(*part)], [3])[3]
        assert predicted == served.acceptance


def test_greedy_answers_are_unchanged(tiny: dict[str, Any]) -> None:
    truth = [answer for _, answer in tiny["answers"]]
    assert tiny["own"].answers == truth[:6]
    assert tiny["strange"].answers == truth[6:]
    assert tiny["together"].answers == truth


def test_sampling_keeps_the_targets_distribution(tiny: dict[str, Any], tiny_target: Path) -> None:
    """Chi-square at the 1e-4 level: the first two tokens of 4000 samples at temperature 0.4 follow transformers' own
    probabilities, with the drafter as without. The second one was drafted, and accepted or not."""
    prompt, alone, drafted = tiny["sampled"]
    model = load_target(tiny_target, TargetConfig("x", dtype="float32"), torch.device("cpu"))
    with torch.no_grad():
        first_V = (model(torch.tensor([prompt])).logits[0, -1] / 0.4).softmax(-1).double()
        behind_VV = model(torch.tensor([[*prompt, t] for t in range(320)])).logits[:, -1]
        behind_VV = (behind_VV / 0.4).softmax(-1).double()
        second_V = first_V @ behind_VV
    assert drafted.acceptance.num_drafts > 2000
    assert 0.05 < drafted.acceptance.per_position[0] < 0.95, "both outcomes are to be common"
    for served in (alone, drafted):
        for place, expected_V in ((0, first_V), (1, second_V)):
            counts_V = torch.bincount(torch.tensor([answer[place] for answer in served.answers]), minlength=320).double()
            assert chi_square_excess(counts_V, 4000 * expected_V) < 0, place


def chi_square_excess(observed_V: torch.Tensor, expected_V: torch.Tensor) -> float:
    """Pearson's statistic less its critical value at 1e-4 (Wilson and Hilferty 1931); rare outcomes are pooled."""
    common = expected_V >= 8
    observed, expected = observed_V[common], expected_V[common]
    if not common.all():
        observed = torch.cat([observed, observed_V[~common].sum()[None]])
        expected = torch.cat([expected, expected_V[~common].sum()[None]])
    degrees = len(observed) - 1
    critical = degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3
    return float(((observed - expected).square() / expected).sum()) - critical


def test_chi_square_excess_finds_a_wrong_distribution() -> None:
    """Fair and loaded dice: 1000 throws with 30 % sixes are far beyond chance."""
    fair = torch.full((6,), 1000 / 6)
    assert chi_square_excess(torch.tensor([170.0, 160, 165, 172, 168, 165]), fair) < 0
    assert chi_square_excess(torch.tensor([140.0, 140, 140, 140, 140, 300]), fair) > 0


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Eagle3Config((0, 2, 5, 8), None, num_steps=2, norm_before_residual=False), id="four layers, full"),
        pytest.param(Eagle3Config((1, 3, 6), 64, num_steps=2, fc_norm=True, norm_output=True), id="eagle 3.1"),
    ],
)
def test_every_switch_reaches_vllm(config: Eagle3Config, tmp_path: Path, tiny: dict[str, Any], tiny_target: Path) -> None:
    """Little-trained drafters of other layouts: vLLM's drafts equal draft()'s, the first layer id and the last one included."""
    answers = tiny["answers"][:2]
    run = overfit(tmp_path / "run", tiny_target, answers, config=config, steps=15, lr=3e-3)
    group = Group([prompt for prompt, _ in answers], max_tokens=16, one_by_one=True)
    (served,) = serve(tmp_path / "served", tiny_target, [group], speculative=speculative(run, 4))
    assert served.answers == [answer[:16] for _, answer in answers]
    assert_drafts_equal(run, served.proposals)


def test_speculators_format_serves_by_itself(tiny: dict[str, Any], tmp_path: Path) -> None:
    """vLLM given nothing but that folder finds the target and drafts as it does from the native format."""
    run: Path = tiny["run"]
    call_script(export.checkpoint.main, str(run), "--format", "speculators", cwd=run)
    group = Group([prompt for prompt, _ in tiny["answers"][:2]], max_tokens=16, one_by_one=True)
    (served,) = serve(tmp_path, run / "export-speculators", [group], speculative=None)
    assert served.answers == [answer[:16] for _, answer in tiny["answers"][:2]]
    assert served.acceptance.num_drafts > 0
    assert served.acceptance.length > 3


BLOCKS: list[tuple[Config, int, int]] = [
    (DFlashConfig(3, 5, 512, (1, 4, 6), None, 300, own_mask_embedding=True), 4, 150),
    (DFlashConfig(2, 4, 512, (2, 5, 8), 120, 300, causal=True, sliding_window=6), 3, 150),
    (DFlashConfig(2, 4, 512, (2, 5, 8), 120, 300, sliding_window=6), 3, 150),
    (DSparkConfig(3, 4, 512, (1, 4, 6), None, 300, markov_rank=16), 4, 150),
    (DSparkConfig(2, 3, 512, (2, 5, 8), 120, 300, causal=True, markov_rank=16), 3, 150),
]


@pytest.mark.parametrize(
    ("config", "k", "steps"),
    BLOCKS,
    ids=["dflash own mask", "dflash reduced causal sliding", "dflash reduced sliding", "dspark", "dspark reduced causal"],
)
def test_block_drafters(config: Config, k: int, steps: int, tmp_path: Path, tiny: dict[str, Any], tiny_target: Path) -> None:
    """All gates of a DFlash and a DSpark drafter of several layers: overfit, drafts position by position on answers they know and
    don't, offline prediction, unchanged answers; the whole vocabulary with the target's own head, and a part with one of theirs.
    """
    answers = [(prompt, answer[:32]) for prompt, answer in tiny["answers"][:6]]
    run = overfit(tmp_path / "run", tiny_target, answers[:4], config=config, steps=steps, lr=2e-3)
    probes = None
    if isinstance(config, DSparkConfig):
        of_all = {"temperature": 1.7, "shift": 0.3}
        (run / "calibration.json").write_text(json.dumps({"step": read_saved(run).step, "of_all": of_all, "of_each": []}))
        call_script(export.checkpoint.main, str(run), cwd=run)
        probes = (torch.randn(5, 96).tolist(), [3, 14, 15, 92, 6])
    known = Group([prompt for prompt, _ in answers[:4]], max_tokens=32, one_by_one=True, probes=probes)
    strange = Group([prompt for prompt, _ in answers[4:]], max_tokens=32, one_by_one=True)
    own, other = serve(tmp_path / "served", tiny_target, [known, strange], speculative=speculative(run, k))
    assert own.answers + other.answers == [answer for _, answer in answers]
    assert own.acceptance.length >= 0.9 * (k + 1), own.acceptance
    assert other.acceptance.length < 0.7 * (k + 1)
    assert_drafts_equal(run, own.proposals)
    assert_drafts_equal(run, other.proposals)
    saved = read_saved(run)
    assert offline_acceptance(saved, answers[:4], [k])[k] == own.acceptance
    # Beside more drafts, too: those of a shorter block are others.
    assert offline_acceptance(saved, answers[4:], [k, k + 2])[k] == other.acceptance
    if probes is not None:
        drafter = rebuild(saved, None)
        assert isinstance(drafter, DSparkDrafter)
        markov = drafter.markov_head.markov_w1(torch.tensor(probes[1]))
        expected = torch.sigmoid(drafter.confidence(torch.tensor(probes[0]), markov) / 1.7 + 0.3)
        torch.testing.assert_close(torch.tensor(own.confidence), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        DFlashConfig(2, 5, 512, (1, 4, 6), 120, 300, own_mask_embedding=True),
        DFlashConfig(2, 4, 512, (2, 5, 8), None, 300, causal=True),
        DSparkConfig(2, 3, 512, (2, 5, 8), 120, 300, markov_rank=16),
    ],
    ids=["dflash own mask", "dflash causal", "dspark"],
)
def test_block_drafters_from_the_speculators_format(
    config: Config, tmp_path: Path, tiny: dict[str, Any], tiny_target: Path
) -> None:
    """vLLM given nothing but that folder drafts as draft() does: mask, causality, vocabulary and layout are read from there."""
    answers = tiny["answers"][:2]
    run = overfit(tmp_path / "run", tiny_target, answers, config=config, steps=15, lr=3e-3)
    call_script(export.checkpoint.main, str(run), "--format", "speculators", cwd=run)
    group = Group([prompt for prompt, _ in answers], max_tokens=16, one_by_one=True)
    (served,) = serve(tmp_path / "served", run / "export-speculators", [group], speculative=None)
    assert served.answers == [answer[:16] for _, answer in answers]
    assert_drafts_equal(run, served.proposals)


TEXTS = ["Name three colours.", "What is a spoon for?", "Write a line about rain.", "Say hello in a friendly way."]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> dict[str, Any]:
    """SmolLM2's answers to four prompts, a drafter overfitted on them, and what vLLM makes of it."""
    folder = tmp_path_factory.mktemp("smollm2")
    chat = Chat.load(smollm2)
    prompts = [chat.prompt([{"role": "user", "content": text}]) for text in TEXTS]
    (alone,) = serve(folder / "alone", smollm2, [Group(prompts, max_tokens=40)], speculative=None)
    answers = list(zip(prompts, alone.answers, strict=True))
    config = Eagle3Config(aux_layers=(2, 15, 27), draft_vocab_size=512, num_steps=3)
    run = overfit(folder / "run", smollm2, answers, config=config, steps=120, lr=2e-3)
    group = Group(prompts, max_tokens=40, one_by_one=True)
    (drafted,) = serve(folder / "drafted", smollm2, [group], speculative=speculative(run, 3))
    return {"answers": answers, "run": run, "drafted": drafted}


def test_smollm2_gates(real: dict[str, Any], smollm2: Path) -> None:
    """On the demo's target: overfit gate, drafts position by position, offline prediction, unchanged greedy answers."""
    answers, drafted = real["answers"], real["drafted"]
    assert drafted.acceptance.length >= 0.9 * 4, drafted.acceptance
    assert drafted.answers == [answer for _, answer in answers]
    assert_drafts_equal(real["run"], drafted.proposals)
    assert offline_acceptance(read_saved(real["run"]), answers, [3])[3] == drafted.acceptance


@pytest.mark.parametrize(
    "config",
    [DFlashConfig(2, 4, 512, (2, 15, 28), 512, 16), DSparkConfig(2, 3, 512, (2, 15, 28), 512, 16, markov_rank=32)],
    ids=["dflash", "dspark"],
)
def test_block_drafters_on_smollm2(config: Config, real: dict[str, Any], smollm2: Path, tmp_path: Path) -> None:
    """The same gates, three drafts ahead, two layers deep; the mask is SmolLM2's last special token, <empty_output>."""
    answers = real["answers"]
    run = overfit(tmp_path / "run", smollm2, answers, config=config, steps=100, lr=1.5e-3)
    group = Group([prompt for prompt, _ in answers], max_tokens=40, one_by_one=True)
    (drafted,) = serve(tmp_path / "served", smollm2, [group], speculative=speculative(run, 3))
    assert drafted.acceptance.length >= 0.9 * 4, drafted.acceptance
    assert drafted.answers == [answer for _, answer in answers]
    assert_drafts_equal(run, drafted.proposals)
    assert offline_acceptance(read_saved(run), answers, [3])[3] == drafted.acceptance


def test_smollm2_answers_alike_in_vllm_and_transformers(real: dict[str, Any], smollm2: Path) -> None:
    """Greedy tokens in fp32 are the same: the dequantised folder is one model to both."""
    model = load_target(smollm2, TargetConfig("x", dtype="float32"), torch.device("cpu"))
    for prompt, answer in real["answers"]:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer
