"""DFlash and DSpark against plain fp64 loops (tests/reference/block.py), masks and anchors by hand, and the invariances."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.target_head import TargetHead
from drafters import losses
from drafters.attention import block_context, own_mask
from drafters.block import BlockDrafter
from drafters.dflash import DFlashConfig, DFlashDrafter
from drafters.drafter import FrozenTarget
from drafters.dspark import DSparkConfig, DSparkDrafter
from drafters.slots import Places, ahead, draw, newest_positions
from recipes.load import RecipeError
from tests.documents import KEPT, MASKS, SHAPE, D, V, make_batch, make_documents
from tests.reference import block as reference

MASK_TOKEN = 39
SMALL: dict[str, Any] = {"num_layers": 2, "block_size": 4, "aux_layers": (1, 2, 3), "mask_token_id": MASK_TOKEN}


def make_head() -> TargetHead:
    return TargetHead(torch.randn(V, D, generator=torch.Generator().manual_seed(7)).double(), None, 1.0, None)


def make_drafter(kind: str, *, kept: Tensor = KEPT, **config: Any) -> BlockDrafter:
    """A drafter whose every weight is random, in fp64."""
    torch.manual_seed(1)
    target = FrozenTarget(torch.randn(V, D).double(), make_head())
    settings = {**SMALL, "draft_vocab_size": len(kept), **config}
    drafter: BlockDrafter
    if kind == "dflash":
        drafter = DFlashDrafter(SHAPE, DFlashConfig(**settings), kept_W=kept, target=target).double()
    else:
        drafter = DSparkDrafter(SHAPE, DSparkConfig(markov_rank=6, **settings), kept_W=kept, target=target).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return drafter


def plain(drafter: BlockDrafter) -> reference.Block:
    assert drafter.embedding_VH is not None
    backbone = drafter.backbone
    return reference.Block(
        drafter.state_dict(),
        SHAPE,
        drafter.embedding_VH,
        num_layers=backbone.num_layers,
        mask=MASK_TOKEN,
        causal=backbone.causal,
        window=backbone.sliding_window,
    )


def head_rows(drafter: BlockDrafter) -> Tensor:
    """What turns a state to logits: the drafter's own head, or the target's."""
    return make_head().weight_VD if drafter.lm_head is None else drafter.lm_head.weight.detach()


def seen_by_hand(documents: Tensor, anchors: list[int], *, window: int | None) -> list[list[list[int]]]:
    """The keys that each of three queries behind each anchor sees of the one row's context, by stretches and edges."""
    places = Places(torch.zeros(len(anchors), dtype=torch.int64), torch.tensor(anchors))
    context = block_context(documents, places, num_queries=3, window=window)
    assert not any(stretch.causal for stretch in context.stretches)
    seen: list[list[list[int]]] = []
    for m in range(len(anchors)):
        shared = [k for s in context.stretches if s.first <= m < s.stop for k in range(s.key_first, s.key_stop)]
        edges = [context.edge_ME[m][mask].tolist() for mask in context.mask_MSE[m]]
        seen.append([sorted(shared + edge) for edge in edges])
    return seen


def test_context_by_hand() -> None:
    """Row 0 0 0 0 1 1 1 with anchors 2, 3 and 5: the context ends before the anchor and keeps to its document."""
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    assert seen_by_hand(documents, [2, 3, 5], window=None) == [[[0, 1]] * 3, [[0, 1, 2]] * 3, [[4]] * 3]
    # Behind anchor 2 queries at 2, 3, 4 see positions more than their own less 2: 1, then none of the context, then none.
    assert seen_by_hand(documents, [2, 3, 5], window=2) == [[[1], [], []], [[2], [], []], [[4], [], []]]
    assert own_mask(3, causal=False, window=None).all()
    own = own_mask(3, causal=True, window=2)
    assert own.int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize("window", [None, 5, 40, 90])
def test_context_is_what_is_seen_position_by_position(window: int | None) -> None:
    """On long documents, whose blocks share stretches, as on short ones."""
    documents = torch.tensor([[0] * 150 + [1] * 9 + [2] * 90])
    anchors = sorted(torch.randperm(249, generator=torch.Generator().manual_seed(0))[:60].tolist())
    starts = [0 if a < 150 else 150 if a < 159 else 159 for a in anchors]
    expected = [
        [[k for k in range(start, a) if window is None or a + s - k < window] for s in range(3)]
        for a, start in zip(anchors, starts, strict=True)
    ]
    assert seen_by_hand(documents, anchors, window=window) == expected


def test_anchors_and_labels_by_hand() -> None:
    """Documents "xx.x", "...x", "....", "xxx" in one row: an anchor at position 0, none at a last supervised token, none
    without a supervised token behind it; labels end with the answer and with the document."""
    batch = make_batch([make_documents(["xx.x", "...x", "....", "xxx"])], make_head(), pad=2)
    assert newest_positions(batch.text).nonzero()[:, 1].tolist() == [0, 12, 13]
    found = ahead(batch.text, Places.where(newest_positions(batch.text)), count=3)
    assert found.valid_MK.tolist() == [[True, False, False], [True, True, False], [True, False, False]]
    assert found.tokens_MK[1, :2].tolist() == batch.text.tokens_BT[0, 13:15].tolist()
    nothing = make_batch([make_documents(["....", "x.x"])], make_head())
    assert len(Places.where(newest_positions(nothing.text)).row_M) == 0


def test_draw_is_even_without_replacement_and_a_function_of_the_seed() -> None:
    """Of 20 places 5 are drawn; over 4000 seeds each is drawn a quarter of the time (binomial, four standard deviations: 0.027);
    a row's draw is the same in whatever batch it stands."""
    chosen = torch.zeros(4000, 50, dtype=torch.bool)
    chosen[:, 10:30] = True
    seeds = torch.randint(1 << 31, (4000,), generator=torch.Generator().manual_seed(0))
    drawn = draw(chosen, seeds, count=5)
    assert (drawn.sum(1) == 5).all()
    shares = drawn.float().mean(0)
    assert (shares[10:30] - 0.25).abs().max() < 0.0274
    assert shares[:10].sum() == shares[30:].sum() == 0
    assert torch.equal(draw(chosen[7:8], seeds[7:8], count=5), drawn[7:8])
    assert torch.equal(draw(chosen, seeds, count=50), chosen)


@pytest.mark.parametrize(
    ("config", "loss"),
    [
        ({}, {}),
        ({"loss": "kl", "gamma": 2.0}, {"loss": "kl"}),
        ({"loss": "tv"}, {"loss": "tv"}),
        ({"loss": "lk"}, {"loss": "lk"}),
        ({"causal": True, "dpace_alpha": 0.5}, {"dpace_alpha": 0.5}),
        ({"sliding_window": 3, "block_size": 5}, {}),
    ],
)
@pytest.mark.parametrize("kept", [KEPT, torch.arange(V)], ids=["reduced", "whole"])
def test_dflash_loss_equals_loops(config: dict[str, Any], loss: dict[str, Any], kept: Tensor) -> None:
    """Loss sum and weight over packed documents with multi-turn masks equal the plain loops over each document alone."""
    drafter, documents = make_drafter("dflash", kept=kept, **config), make_documents(MASKS)
    assert isinstance(drafter, DFlashDrafter)
    assert (drafter.lm_head is None) == (len(kept) == V)
    batch = make_batch([documents[:2], documents[2:]], make_head(), pad=3)
    output = drafter(batch)
    total, weight = reference.dflash_loss(
        plain(drafter),
        documents,
        head_rows(drafter),
        make_head().weight_VD[kept],
        kept.tolist(),
        size=drafter.config.block_size,
        gamma=drafter.config.gamma,
        **loss,
    )
    assert float(output.weight) == pytest.approx(weight, rel=1e-6)
    assert float(output.loss_sum.detach()) == pytest.approx(total, rel=1e-5)
    assert float(drafter.loss_weight(batch)) == float(output.weight)


def test_only_drawn_anchors_are_learned_from() -> None:
    """Of each packed row two: the loss and its weight are the plain loops' over those two."""
    drafter, documents = make_drafter("dflash", num_anchors=2), make_documents(MASKS)
    assert isinstance(drafter, DFlashDrafter)
    rows = [documents[:2], documents[2:]]
    batch = make_batch(rows, make_head(), pad=3)
    places = draw(newest_positions(batch.text), batch.text.seed_B, count=2)
    assert places.sum(1).tolist() == [2, 2]
    drawn = []
    for b, row in enumerate(rows):
        start = 0
        for document in row:
            length = len(document["tokens"])
            drawn.append(places[b, start : start + length].nonzero()[:, 0].tolist())
            start += length
    total, weight = reference.dflash_loss(
        plain(drafter), documents, head_rows(drafter), make_head().weight_VD[KEPT], KEPT.tolist(), size=4, gamma=7.0, drawn=drawn
    )
    output = drafter(batch)
    assert float(output.weight) == pytest.approx(weight, rel=1e-6)
    assert float(output.loss_sum.detach()) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_targets_head_without_what_it_does_to_its_logits(kind: str) -> None:
    """vLLM runs a drafter's shared head without bias, scale and soft cap; the target's own distribution has all three."""
    drafter = make_drafter(kind, kept=torch.arange(V))
    plain_head = make_head()
    drafter.teacher = plain_head._replace(bias_V=torch.randn(V).double(), scale=0.125, soft_cap=3.0)
    hidden = torch.randn(5, D).double()
    torch.testing.assert_close(drafter.logits(hidden), (hidden @ plain_head.weight_VD.T).float())
    batch = make_batch([make_documents(MASKS)], plain_head)
    rows = drafter.teacher_rows(batch, drafter.labels(batch))
    expected = 3 * torch.tanh(0.125 * (rows.states_JD @ plain_head.weight_VD.T + drafter.teacher.bias_V) / 3)
    torch.testing.assert_close(rows.head.logits(rows.states_JD), expected)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("dflash", {"mask_token_id": V}, f"mask_token_id is {V}, but the target's embedding has {V} rows"),
        ("dflash", {"gamma": 0.0}, "gamma is 0.0; give more than 0"),
        ("dspark", {"gamma": -1.0}, "gamma is -1.0; give more than 0"),
        ("dflash", {"dpace_alpha": 1.5}, "dpace_alpha is 1.5; give 0 to 1, or null for none"),
        ("dspark", {"block_size": 1}, "block_size is 1; give 2 or more"),
    ],
)
def test_values_that_cannot_be(kind: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_drafter(kind, **config)


@pytest.mark.parametrize("config", [{}, {"causal": True, "gamma": 2.0, "block_size": 5, "confidence": "greedy"}])
@pytest.mark.parametrize("kept", [KEPT, torch.arange(V)], ids=["reduced", "whole"])
def test_dspark_loss_equals_loops(config: dict[str, Any], kept: Tensor) -> None:
    drafter, documents = make_drafter("dspark", kept=kept, **config), make_documents(MASKS)
    assert isinstance(drafter, DSparkDrafter)
    batch = make_batch([documents[:2], documents[2:]], make_head(), pad=3)
    output = drafter(batch)
    total, weight = reference.dspark_loss(
        plain(drafter),
        documents,
        head_rows(drafter),
        make_head().weight_VD[kept],
        kept.tolist(),
        size=drafter.config.block_size,
        gamma=drafter.config.gamma,
        greedy=drafter.config.confidence == "greedy",
    )
    assert float(output.weight) == pytest.approx(weight, rel=1e-6)
    assert float(output.loss_sum.detach()) == pytest.approx(total, rel=1e-5)
    assert float(drafter.loss_weight(batch)) == pytest.approx(float(output.weight), rel=1e-6)


def gradients(drafter: BlockDrafter, batches: list[Any]) -> dict[str, Tensor]:
    drafter.zero_grad()
    torch.stack([drafter(batch).loss_sum for batch in batches]).sum().backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_arrangement_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing, padding and accumulation leave the gradients as they are, to the last digits of fp64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # softmax and losses too, else taken in fp32
    drafter, documents, head = make_drafter(kind), make_documents(MASKS), make_head()
    expected = gradients(drafter, [make_batch([documents[:2], documents[2:]], head)])
    assert expected.keys() == dict(drafter.named_parameters()).keys()
    for batches in (
        [make_batch([[one] for one in documents], head)],
        [make_batch([documents[::-1]], head, pad=5)],
        [make_batch([[one]], head) for one in documents],
    ):
        for name, grad in gradients(drafter, batches).items():
            torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_chunks_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows at a time: the same gradients."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    drafter, batch = make_drafter(kind), make_batch([make_documents(MASKS)], make_head())
    expected = gradients(drafter, [batch])
    monkeypatch.setattr(losses, "chunk_rows", lambda *_: 4)
    for name, grad in gradients(drafter, [batch]).items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_unsupervised_batch_gives_zero_loss_and_zero_gradients(kind: str) -> None:
    """A rank whose rows hold no label takes part with zeros: no NaN, no missing gradient."""
    drafter = make_drafter(kind)
    output = drafter(make_batch([make_documents(["....", "x.x"])], make_head()))
    output.loss_sum.backward()
    assert float(output.weight) == 0.0
    assert all(p.grad is not None and float(p.grad.abs().sum()) == 0.0 for p in drafter.parameters())


def test_confidence_learns_without_moving_what_it_reads() -> None:
    """Its loss reaches the confidence head alone: not the backbone, not the Markov embedding."""
    drafter = make_drafter("dspark")
    assert isinstance(drafter, DSparkDrafter)
    drafter.config = replace(drafter.config, ce_weight=0.0, l1_weight=0.0)
    drafter(make_batch([make_documents(MASKS)], make_head())).loss_sum.backward()
    moved = {name for name, p in drafter.named_parameters() if p.grad is not None and float(p.grad.abs().sum()) > 0}
    assert moved == {"confidence_head.proj.weight", "confidence_head.proj.bias"}


@pytest.mark.parametrize("confidence", ["greedy", "sampled"])
def test_judged_confidences_equal_loops(confidence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind every prefix: the confidence of each draft, the text's own tokens before it; whether the most likely one is the text's
    token, or whether a draw of the overlap of p and q, behind the right state of the target, says so; and what was reached."""
    drafter, documents, head = make_drafter("dspark", confidence=confidence), make_documents(MASKS), make_head()
    assert isinstance(drafter, DSparkDrafter)
    states: list[Tensor] = []

    def overlap(_logits_RW: Tensor, last_RD: Tensor, _head: Any) -> Tensor:
        states.append(last_RD)
        return (last_RD.sum(-1) > 0).float()  # certain, or impossible: no luck needed

    monkeypatch.setattr(drafter, "overlap", overlap)
    logits_RK, accepted_RK, reached_RK = drafter.judge_confidence(
        [make_batch([row], head, pad=2) for row in (documents[:2], documents[2:])], head
    )
    behind = [torch.cat(states[k :: drafter.num_drafts]) for k in range(drafter.num_drafts)] if states else []
    loops, row, seen = plain(drafter), 0, 0
    w1, w2 = loops.w["markov_head.markov_w1.weight"], loops.w["markov_head.markov_w2.weight"]
    for document in documents:
        tokens = document["tokens"]
        for p in reference.anchors(document):
            hidden, reached = loops.run(tokens[: p + 1], document["aux_TAD"], p, drafter.num_drafts), True
            length = reference.run_length(document["mask"], p + 1, drafter.num_drafts)
            assert not reached_RK[row, length:].any()
            for k in range(length):
                markov = w1[tokens[p + k]]
                logit = loops.w["confidence_head.proj.weight"][0] @ torch.cat([hidden[k], markov])
                expected = float(logit + loops.w["confidence_head.proj.bias"][0])
                assert float(logits_RK[row, k]) == pytest.approx(expected, abs=1e-5)
                accepted = int(KEPT[(head_rows(drafter) @ hidden[k] + w2 @ markov).argmax()]) == tokens[p + k + 1]
                if confidence == "sampled":
                    torch.testing.assert_close(behind[k][row], document["last_TD"][p + k])
                    accepted = bool(document["last_TD"][p + k].sum() > 0)
                assert bool(accepted_RK[row, k]) == accepted
                assert bool(reached_RK[row, k]) == reached
                reached, seen = reached and accepted, seen + 1
            row += 1
    assert row == len(logits_RK)
    assert seen > 20


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("config", [{}, {"causal": True}, {"sliding_window": 3}])
@pytest.mark.parametrize("kept", [KEPT, torch.arange(V)], ids=["reduced", "whole"])
def test_propose_equals_plain_draft_equals_loops(kind: str, config: dict[str, Any], kept: Tensor) -> None:
    """Drafts made behind all prefixes side by side equal those of the plain decode behind each, and those the loops give."""
    drafter, documents = make_drafter(kind, kept=kept, **config), make_documents([*MASKS, "xx"])
    batch = make_batch([documents[:2], documents[2:]], make_head(), pad=2)
    proposals = drafter.propose(batch, num_drafts=4)
    loops, compared = plain(drafter), 0
    for b, row in enumerate([documents[:2], documents[2:]]):
        start = 0
        for document in row:
            tokens, features = document["tokens"], document["aux_TAD"]
            for of, newest, drafts in zip(*(x.tolist() for x in (*proposals.newest, proposals.drafts_MK)), strict=True):
                newest -= start
                if of != b or not 0 <= newest < len(tokens):
                    continue
                assert drafter.draft(tokens[: newest + 1], features[:newest], num_drafts=4) == drafts
                assert loop_draft(drafter, loops, tokens[: newest + 1], features, kept) == drafts
                compared += 1
            start += len(tokens)
    assert compared == len(proposals.drafts_MK) == sum(len(reference.anchors(d)) for d in documents) == 15


def loop_draft(drafter: BlockDrafter, loops: reference.Block, tokens: list[int], features: Tensor, kept: Tensor) -> list[int]:
    head, anchor = head_rows(drafter), len(tokens) - 1
    if isinstance(drafter, DFlashDrafter):
        return [int(kept[(head @ hidden).argmax()]) for hidden in loops.run(tokens, features, anchor, 5)[1:]]
    drafts, before = [], tokens[-1]
    for hidden in loops.run(tokens, features, anchor, 4):
        markov = loops.w["markov_head.markov_w2.weight"] @ loops.w["markov_head.markov_w1.weight"][before]
        before = int(kept[(head @ hidden + markov).argmax()])
        drafts.append(before)
    return drafts


def test_a_mask_embedding_of_its_own() -> None:
    """Stands for the masks and for an anchor that is that token; the loops get it as a row of the embedding. It learns."""
    drafter, (document,) = make_drafter("dflash", own_mask_embedding=True), make_documents(["xxxxxx"])
    document["tokens"][2] = MASK_TOKEN
    assert drafter.mask_embedding is not None
    assert drafter.embedding_VH is not None
    loops = plain(drafter)
    loops.embedding = drafter.embedding_VH.clone()
    loops.embedding[MASK_TOKEN] = drafter.mask_embedding.detach()
    batch = make_batch([[document]], make_head())
    proposals = drafter.propose(batch, num_drafts=4)
    for newest, drafts in zip(proposals.newest.index_M.tolist(), proposals.drafts_MK.tolist(), strict=True):
        prefix = document["tokens"][: newest + 1]
        assert loop_draft(drafter, loops, prefix, document["aux_TAD"], KEPT) == drafts
        assert drafter.draft(prefix, document["aux_TAD"][:newest], num_drafts=4) == drafts
    drafter(batch).loss_sum.backward()
    assert drafter.mask_embedding.grad is not None
    assert float(drafter.mask_embedding.grad.abs().sum()) > 0


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_expected_length_equals_loops(kind: str) -> None:
    """1 + sum over k of the product of the sums of min(p, q), behind every prefix of two tokens or more that goes on for three; p
    is over the whole vocabulary, the tokens before each draft are the text's own."""
    drafter, documents, head = make_drafter(kind), make_documents(MASKS), make_head()
    total, count = drafter.expected_length(make_batch([documents[:2], documents[2:]], head, pad=2), head, num_drafts=3)
    loops, lengths = plain(drafter), []
    for document in documents:
        for p in reference.anchors(document):
            if p == 0 or reference.run_length(document["mask"], p + 1, 3) < 3:
                continue
            tokens = document["tokens"]
            hidden = loops.run(tokens[: p + 1], document["aux_TAD"], p, 4 if kind == "dflash" else 3)
            length = reached = 1.0
            for k in range(3):
                logits = head_rows(drafter) @ hidden[k + 1 if kind == "dflash" else k]
                if kind == "dspark":
                    w1, w2 = loops.w["markov_head.markov_w1.weight"], loops.w["markov_head.markov_w2.weight"]
                    logits = logits + w2 @ w1[tokens[p + k]]
                target = torch.softmax(head.weight_VD @ document["last_TD"][p + k], 0)[KEPT]
                reached *= float(torch.minimum(torch.softmax(logits, 0), target).sum())
                length += reached
            lengths.append(length)
    assert int(count) == len(lengths)
    assert float(total) == pytest.approx(sum(lengths), rel=1e-5)
