"""The online teacher against transformers' own hidden states and logits."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from data.batch import Document
from data.target import TargetConfig
from data.target_head import TargetHead, first_argmax, head_logits
from data.target_model import load_target
from data.teacher import OnlineTeacher, check_aux_layers
from recipes.load import RecipeError
from tests.sizes import Sizes


def make_documents(lengths: list[int], vocab_size: int = 320) -> list[Document]:
    torch.manual_seed(0)
    out = []
    for i, length in enumerate(lengths):
        tokens = torch.randint(3, vocab_size, (length,))
        out.append(Document(str(i), tokens, torch.arange(length) >= length // 2))
    return out


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> PreTrainedModel:
    return load_target(tiny_target, TargetConfig(str(tiny_target), dtype="float32"), torch.device("cpu"))


@pytest.fixture(scope="module")
def gemma2() -> PreTrainedModel:
    """A target with scaled embeddings, a soft cap on its logits and sliding-window layers."""
    torch.manual_seed(0)
    config = Gemma2Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=320,
        sliding_window=8,
        final_logit_softcapping=5.0,
        initializer_range=0.2,
    )
    return Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize("name", ["model", "gemma2"])
def test_features_equal_hidden_states(name: str, request: pytest.FixtureRequest) -> None:
    """Of every document, whatever shares its forward: states 0, 3, 5 and 8 of 8 layers, the last one before the final norm."""
    target: PreTrainedModel = request.getfixturevalue(name)
    teacher = OnlineTeacher(target, (0, 3, 5, 8))
    before_norm = {}
    target.get_decoder().norm.register_forward_pre_hook(lambda _, args: before_norm.update(x=args[0]))
    docs = make_documents([17, 5, 30, 9])
    found = teacher.features(docs)
    for document, features in zip(docs, found, strict=True):
        with torch.no_grad():
            plain = target(document.tokens_T[None], output_hidden_states=True)
        expected = [plain.hidden_states[0][0], plain.hidden_states[3][0], plain.hidden_states[5][0], before_norm["x"][0]]
        torch.testing.assert_close(features.aux_hidden_TAD, torch.stack(expected, 1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(features.last_hidden_TD, plain.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
        logits = teacher.head.logits(features.last_hidden_TD)
        torch.testing.assert_close(logits, plain.logits[0], rtol=1e-4, atol=1e-4)
        judged = features.argmax_T >= 0
        assert judged.tolist() == [*document.loss_mask_T[1:].tolist(), False]
        assert features.argmax_T[judged].tolist() == plain.logits[0].argmax(-1)[judged].tolist()


def test_batch_packs_documents_and_their_features(model: PreTrainedModel) -> None:
    teacher = OnlineTeacher(model, (2, 4))
    docs = make_documents([4, 6, 5])
    features = teacher.features(docs)
    batch = teacher.batch([docs[:2], docs[2:]])
    assert batch.text.tokens_BT[0].tolist() == [*docs[0].tokens_T.tolist(), *docs[1].tokens_T.tolist()]
    assert batch.text.document_ids_BT.tolist() == [[0] * 4 + [1] * 6, [0] * 5 + [-1] * 5]
    assert batch.text.positions_BT[0].tolist() == [*range(4), *range(6)]
    assert batch.text.loss_mask_BT[1].tolist() == [*docs[2].loss_mask_T.tolist(), *[False] * 5]
    torch.testing.assert_close(batch.aux_hidden_BTAD[0, 4:], features[1].aux_hidden_TAD)
    torch.testing.assert_close(batch.last_hidden_BTD[1, :5], features[2].last_hidden_TD)
    assert batch.argmax_BT[1, 5:].tolist() == [-1] * 5


def test_keeps_what_fits_the_budget(model: PreTrainedModel) -> None:
    """Whole groups of neighbours in length, whatever the order they are given in; their features are those of a fresh run."""
    docs = make_documents([5 + i % 7 for i in range(20)])
    alone = {d.id: OnlineTeacher(model, (2, 4)).features([d])[0] for d in docs}
    shortest_16 = sorted(docs, key=lambda d: (len(d.tokens_T), d.id))[:16]
    budget = sum(alone[d.id].num_bytes() for d in shortest_16) + 1
    for given in (docs, docs[::-1]):
        teacher = OnlineTeacher(model, (2, 4))
        teacher.keep(given, budget_bytes=budget, show=False)
        assert teacher.kept.keys() == {d.id for d in shortest_16}
        for d, found in zip(docs, teacher.features(docs), strict=True):
            for tensor, expected in zip(found, alone[d.id], strict=True):
                torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-4)


def test_head_of_tied_and_scaled_models(model: PreTrainedModel) -> None:
    """Rows of the head give the same logits as the whole head does at those ids; argmax is chunked without a trace."""
    head = TargetHead.of(model)
    hidden = torch.randn(700, 96)
    kept = torch.tensor([3, 8, 250])
    torch.testing.assert_close(head.rows(kept).logits(hidden), head.logits(hidden)[:, kept])
    assert torch.equal(head.argmax(hidden, chunk=64), head.logits(hidden).argmax(-1))
    scaled = head._replace(scale=0.25, soft_cap=2.0)
    torch.testing.assert_close(scaled.logits(hidden), 2 * torch.tanh(head.logits(hidden) * 0.25 / 2))


@pytest.mark.parametrize("words", [1, 512, 1500])
def test_head_logits_in_blocks_are_those_of_torch(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one read or several, at 512 words a block or fewer; a room that has other columns beside it keeps those."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    torch.manual_seed(0)
    reads = [(torch.randn(7, width, dtype=torch.float64), torch.randn(words, width, dtype=torch.float64)) for width in (5, 3)]
    room = torch.zeros(7, words + 2, dtype=torch.float64)
    linear = torch.nn.functional.linear
    torch.testing.assert_close(head_logits(reads[:1]), linear(*reads[0]))
    torch.testing.assert_close(head_logits(reads, room[:, :words]), linear(*reads[0]) + linear(*reads[1]))
    assert room[:, :words].all()
    assert not room[:, words:].any()


def test_aux_layers_are_checked() -> None:
    check_aux_layers((0, 8), 8)
    for ids, message in (
        ((2, 9), r"aux_layers has 9, but the target has states 0..8 \(0: the embeddings\); give those"),
        ((-1, 2), "aux_layers has -1"),
        ((4, 2), r"aux_layers is \[4, 2\]; give one id or more, ascending"),
        ((2, 2), "ascending"),
        ((), "one id or more"),
    ):
        with pytest.raises(RecipeError, match=message):
            check_aux_layers(ids, 8)


def test_target_is_frozen_and_in_its_dtype(tiny_target: Path) -> None:
    model = load_target(tiny_target, TargetConfig("x", dtype="bfloat16"), torch.device("cpu"))
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())
    assert AutoModelForCausalLM.from_pretrained(tiny_target).dtype == torch.float32


@pytest.mark.parametrize("width", [5, 64, 200])
def test_argmax_in_blocks_is_the_first_of_equals(width: int) -> None:
    """Of few different values, so that most rows have several largest ones, in and across blocks and in the rest."""
    drawn = torch.randint(0, 4, (500, width), generator=torch.Generator().manual_seed(0)).float()
    expected = torch.tensor([row.index(max(row)) for row in drawn.tolist()])
    assert torch.equal(first_argmax(drawn), expected)
    assert first_argmax(drawn[:0]).shape == (0,)


def test_argmax_of_a_head_with_everything() -> None:
    torch.manual_seed(0)
    head, hidden = TargetHead(torch.randn(150, 8), torch.randn(150), 0.5, 30.0), torch.randn(40, 8)
    with Sizes() as sizes:
        found = head.argmax(hidden, chunk=16)
    assert torch.equal(found, head.logits(hidden).argmax(-1))
    assert max(sizes.found) == 16 * 150, "logits of a chunk at most"


def test_logits_of_a_head_in_half_precision_are_fp32() -> None:
    """Of bf16 products: a scale behind them rounds no more."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(50, 8, dtype=torch.bfloat16), torch.randn(20, 8)
    logits = TargetHead(weight, None, 1 / 3, None).logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, (hidden.bfloat16() @ weight.T).float() / 3)


def test_greedy_text_is_its_own_argmax(model: PreTrainedModel) -> None:
    """What transformers generates greedily behind a prompt: the argmax of the features is the same, read off the text."""
    prompt = torch.arange(5, 13)
    tokens_T = model.generate(prompt[None], do_sample=False, max_new_tokens=12, min_new_tokens=12)[0]
    text = Document("a", tokens_T, torch.arange(20) >= 8)
    teacher = OnlineTeacher(model, (2,))
    (found,), (read_off,) = (teacher.features([document]) for document in (text, text._replace(greedy=True)))
    assert read_off.argmax_T.tolist() == [-1] * 7 + tokens_T[8:].tolist() + [-1]
    assert torch.equal(found.argmax_T, read_off.argmax_T)
    # The head is not asked: other tokens would be believed, too.
    (believed,) = teacher.features([text._replace(tokens_T=torch.arange(3, 23), greedy=True)])
    assert believed.argmax_T[7:19].tolist() == list(range(11, 23))
