"""EAGLE-3 (arXiv 2503.01840, 3.1: arXiv 2605.09992): one decoder layer over fused target features, trained on its own output.

Slot t holds the target's aux features at t and the embedding of token t+1, and predicts token t+2 against the target's
distribution at t+1. At serving time the features stop there, and the layer is fed its own output; training does the same
("training-time test"). For the answer tokens a b c d e of one document:

    slot            :  t      t+1    t+2
    features of     :  a      b      c
    step 0: embeds  :  b      c      d      predicts  c    d    e     (labels: the target at t+1 ...)
    step 1: embeds  :  c      d      e      predicts  d    e          hidden = own output of step 0 at the same slot
    step 2: embeds  :  d      e             predicts  e               hidden = own output of step 1 at the same slot

At step k a slot's query sits at rotary position t+k. It sees the step-0 keys of slots <= t (true features, as after a
verification) and its own keys of steps 1..k (what it drafted since). The embedded token is the true one in training
(teacher forcing) and the drafter's own in propose() and draft().

Shapes: B rows, T tokens, M drafting slots of all rows, K steps, R labels of these, A aux layers, D target width, H drafter
width, W draft vocabulary, N heads, G key-value heads, C head size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from data.batch import Batch, StepOutput, Text, to_device
from drafters.attention import attend, slot_stretches
from drafters.drafter import Drafter, FrozenTarget, Proposals, Work, most_likely, num_weights
from drafters.layers import MLP, Attention, DrafterShape, RMSNorm
from drafters.losses import HeadLoss, Loss, LossWeights, TeacherRows, head_loss
from drafters.saved import Saved
from drafters.slots import Places, ahead, newest_positions
from recipes.load import RecipeError, build


@dataclass(frozen=True)
class Eagle3Config:
    """What a recipe says of an EAGLE-3 drafter.

    aux_layers: ids of the target's states to read; null: [2, N // 2, N - 3] of N layers.
    draft_vocab_size: tokens the drafter can propose; null keeps the target's whole vocabulary.
    num_steps: training-time-test steps K; train at least as many as will be drafted when serving.
    step_decay: the loss of step k weighs step_decay ** k.
    norm_before_residual, fc_norm, norm_output: the layer variants vLLM knows (fc_norm and norm_output are EAGLE-3.1).
    """

    aux_layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = 32000
    num_steps: int = 7
    step_decay: float = 0.8
    loss: Loss = "kl"
    norm_before_residual: bool = True
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise RecipeError(f"num_steps is {self.num_steps}; give 1 or more")


def drafting_slots(text: Text) -> Places:
    """Slots t behind whose token t+1 a server drafts."""
    drafts_BT = torch.zeros_like(text.loss_mask_BT)
    drafts_BT[:, :-1] = newest_positions(text)[:, 1:]
    # Slot t reads the features of t, which must be of the same document.
    drafts_BT[:, :-1] &= text.document_ids_BT[:, :-1] == text.document_ids_BT[:, 1:]
    return Places.where(drafts_BT)


class Labels(NamedTuple):
    """What a batch is learned from: M slots, K steps of each, of which R predict a token of the target's own; int64 if not said
    otherwise.

    On the host: places: of the slots. tokens_MK: the text's tokens that the steps predict; valid_MK, bool: those R. step_R, slot_R:
    which they are; judge_R: the slot whose step 0 has the same label and judge, ascending.
    On the device: said_R, bool: the drafter has the label in its vocabulary; label_R: there, else 0; weight_R, fp32: 0 without it.
    (They are not left out: how many there are would have to be waited for.)
    """

    places: Places
    tokens_MK: Tensor
    valid_MK: Tensor
    step_R: Tensor
    slot_R: Tensor
    judge_R: Tensor
    label_R: Tensor
    said_R: Tensor
    weight_R: Tensor


class Eagle3Layer(nn.Module):
    """The decoder layer: attention over concat(norm(embedding), norm(hidden)) of width 2H, then an ordinary MLP."""

    def __init__(self, shape: DrafterShape, config: Eagle3Config) -> None:
        super().__init__()
        H = shape.hidden_size
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(H, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(H, shape.rms_norm_eps)
        self.self_attn = Attention(2 * H, shape)
        self.post_attention_layernorm = RMSNorm(H, shape.rms_norm_eps)
        self.mlp = MLP(H, shape.intermediate_size)

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input [..., 2H], residual [..., H])."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat((self.input_layernorm(embedding), normed), dim=-1), residual

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The layer's output, the pre-norm residual stream [..., H], from what each head read, [..., N, C]."""
        residual = residual + self.self_attn.output(attended)
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output


class Eagle3Drafter(Drafter):
    """EAGLE-3: its network, its loss, its decode.

    kept_W: int64 target ids of the draft vocabulary, ascending. target: the frozen target's tensors, on the drafter's
    device; None where only the drafter's own parameters matter (export, planning on the meta device).
    """

    kept_W: Tensor
    target_to_draft_V: Tensor

    def __init__(
        self,
        shape: DrafterShape,
        config: Eagle3Config,
        *,
        kept_W: Tensor,
        target: FrozenTarget | None = None,
    ) -> None:
        super().__init__()
        H = shape.hidden_size
        assert config.aux_layers is not None
        num_aux_layers = len(config.aux_layers)
        self.config = config
        self.num_drafts = self.num_queries = config.num_steps
        self.fc = nn.Linear(num_aux_layers * H, H, bias=False)
        self.fc_norm = nn.ModuleList(RMSNorm(H, shape.rms_norm_eps) for _ in range(num_aux_layers * config.fc_norm))
        self.midlayer = Eagle3Layer(shape, config)
        self.norm = RMSNorm(H, shape.rms_norm_eps)
        self.lm_head = nn.Linear(H, len(kept_W), bias=False)
        target_to_draft_V = torch.full((shape.vocab_size,), -1, dtype=torch.int64, device=kept_W.device)
        target_to_draft_V[kept_W] = torch.arange(len(kept_W), device=kept_W.device)
        keys = num_weights(self.midlayer.self_attn.k_proj, self.midlayer.self_attn.v_proj)
        self.work = Work(
            token=(6.0 if config.fc_norm else 4.0) * num_weights(self.fc) + 6.0 * keys,  # features need no gradient, their norms do
            place=6.0 * (config.num_steps * num_weights(self.midlayer) - keys),  # step 0 reads the row's keys
            label=6.0 * num_weights(self.lm_head),
            judge=2.0 * num_weights(self.lm_head) * LossWeights.of(config.loss).needs_teacher,
        )
        self.register_buffer("kept_W", kept_W, persistent=False)
        self.register_buffer("target_to_draft_V", target_to_draft_V, persistent=False)
        # A plain start beat layer, norm and head copied from the target's own (2026-11-29, SmolLM2: 2.42 against 2.35, and
        # 2.23 with the head alone, after two epochs), and is the same for every target.
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        # Plain attributes, so that no engine saves, shards or casts what belongs to the target.
        self.embedding_VH = None if target is None else target.embedding_VH
        self.teacher = None if target is None else target.head.rows(kept_W)

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings [..., H] of token ids [...], in the drafter's dtype."""
        assert self.embedding_VH is not None, "this drafter was built without its target's tensors"
        tokens = to_device(tokens, self.embedding_VH.device)
        return nn.functional.embedding(tokens, self.embedding_VH).to(self.fc.weight.dtype)

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        """Fused features [..., H] of aux hidden states [..., A, D]."""
        if self.fc_norm:
            normed = [norm(aux_hidden[..., i, :]) for i, norm in enumerate(self.fc_norm)]
            aux_hidden = torch.stack(normed, dim=-2)
        fused: Tensor = self.fc(aux_hidden.flatten(-2).to(self.fc.weight.dtype))
        return fused

    def unroll(
        self, batch: Batch, places: Places, *, num_steps: int, next_tokens: Callable[[int, Tensor], Tensor]
    ) -> Iterator[Tensor]:
        """Yields, for steps 0..num_steps-1, what lm_head reads: the normed output at every slot, [M, H].

        next_tokens(k, normed_MH of step k) names the tokens [M] that step k+1 embeds.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        text, device = batch.text, batch.aux_hidden_BTAD.device
        stretches = slot_stretches(text.document_ids_BT, places)
        positions_BT, positions_M = (to_device(x, device) for x in (text.positions_BT, places.of(text.positions_BT)))
        x_BTX, residual_BTH = layer.inputs(self.embed(text.tokens_BT.roll(-1, dims=1)), self.fuse(batch.aux_hidden_BTAD))
        shared = attention.keys_values(x_BTX, positions_BT)
        x, residual = places.of(x_BTX), places.of(residual_BTH)
        own: list[tuple[Tensor, Tensor]] = []
        for k in range(num_steps):
            query_M1NC = attention.queries(x, positions_M + k)[:, None]
            hidden_MH = layer.finish(attend(query_M1NC, shared, stretches, own=own)[:, 0], residual)
            normed_MH: Tensor = self.norm(hidden_MH)
            yield normed_MH
            if k + 1 == num_steps:
                return
            fed_back_MH = normed_MH if self.config.norm_output else hidden_MH
            x, residual = layer.inputs(self.embed(next_tokens(k, normed_MH)), fed_back_MH)
            key_MGC, value_MGC = attention.keys_values(x, positions_M + k + 1)
            own.append((key_MGC[:, None], value_MGC[:, None]))

    # -- training ------------------------------------------------------------------------------------------------------

    def labels(self, batch: Batch) -> "Labels":
        """What the loss is over. A label is the target's most likely token; a slot whose label can't be said does not count."""
        places = drafting_slots(batch.text)
        found = ahead(batch.text, places.shifted(1), count=self.config.num_steps)
        # Slot m at step k is judged by the target's distribution of slot m + k, whose features end k tokens later: slots of one
        # answer are neighbours.
        step_R, slot_R = found.valid_MK.T.nonzero(as_tuple=True)
        judge_R, order_R = (slot_R + step_R).sort(stable=True)
        step_R, slot_R = step_R[order_R], slot_R[order_R]
        judges = Places(places.row_M[judge_R], places.index_M[judge_R] + 1)
        label_R = self.target_to_draft_V[judges.of(batch.argmax_BT).clamp_min(0)]
        said_R = label_R >= 0
        weight_R = said_R * to_device(torch.pow(self.config.step_decay, step_R.float()), said_R.device)
        label_R = label_R.clamp_min(0)
        return Labels(places, found.tokens_MK, found.valid_MK, step_R, slot_R, judge_R, label_R, said_R, weight_R)

    def places_per_row(self, supervised: float) -> float:
        """See Drafter."""
        return supervised

    def loss_weight(self, batch: Batch) -> Tensor:
        """The weight of this batch in the loss, before any forward: what StepOutput.weight will be."""
        return self.labels(batch).weight_R.sum()

    def forward(self, batch: Batch) -> StepOutput:
        """Loss of the training-time test over all labelled rows of the batch; EAGLE-3's sum over k of step_decay^k * L_k.

        Metrics per step k: agreement_k, the share of slots whose most likely token is the target's own (out-of-vocabulary
        tokens count as misses); loss_k, the unweighted loss.
        """
        assert self.teacher is not None, "this drafter was built without its target's tensors"
        labels, K = self.labels(batch), self.config.num_steps
        tokens_MK = to_device(labels.tokens_MK, labels.label_R.device)
        steps = self.unroll(batch, labels.places, num_steps=K, next_tokens=lambda k, _: tokens_MK[:, k])
        normed_KMH = torch.stack(list(steps))
        num_slots, loss_weights = len(labels.places.row_M), LossWeights.of(self.config.loss)
        at_R = to_device(labels.step_R * num_slots + labels.slot_R, normed_KMH.device)
        read_RH = normed_KMH.flatten(0, 1).index_select(0, at_R)
        teacher = None
        if loss_weights.needs_teacher:
            last_MD = labels.places.shifted(1).of(batch.last_hidden_BTD)
            teacher = TeacherRows(self.teacher, last_MD, labels.judge_R)
        judged = head_loss(
            [(read_RH, self.lm_head.weight)],
            loss_weights,
            weight_R=labels.weight_R,
            label_R=labels.label_R,
            teacher=teacher,
        )
        work = self.work.of(tokens=batch.text.tokens_BT.numel(), places=num_slots, labels=len(labels.step_R), judges=num_slots)
        return StepOutput(judged.loss_sum, labels.weight_R.sum(), self._metrics(labels, judged), work)

    def _metrics(self, labels: "Labels", judged: HeadLoss) -> dict[str, tuple[Tensor, Tensor]]:
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        step_R, said_R = to_device(labels.step_R, judged.loss_R.device), labels.said_R
        hits_K, loss_K, count_K = (
            values_R.new_zeros(self.config.num_steps, dtype=torch.float32).index_add(0, step_R, values_R.to(torch.float32))
            for values_R in (judged.hit_R & said_R, judged.loss_R * said_R, said_R)
        )
        for k, valid in enumerate(to_device(labels.valid_MK.sum(0).float(), said_R.device)):
            metrics[f"agreement_{k}"] = (hits_K[k], valid)
            metrics[f"loss_{k}"] = (loss_K[k], count_K[k])
        return metrics

    # -- decoding ------------------------------------------------------------------------------------------------------

    def forced_logits(self, batch: Batch, newest: Places, *, num_drafts: int) -> Iterator[Tensor]:
        """See Drafter."""
        truth_MK = to_device(ahead(batch.text, newest, count=num_drafts).tokens_MK, batch.last_hidden_BTD.device)
        steps = self.unroll(batch, newest.shifted(-1), num_steps=num_drafts, next_tokens=lambda k, _: truth_MK[:, k])
        return map(self.lm_head, steps)

    @torch.no_grad()
    def propose(self, batch: Batch, *, num_drafts: int) -> Proposals:
        """See Drafter; draft() is its plain twin."""
        places = drafting_slots(batch.text)
        drafts: list[Tensor] = []

        def own_tokens(_: int, normed_MH: Tensor) -> Tensor:
            drafts.append(self.kept_W[most_likely(lambda rows: self.lm_head(normed_MH[rows]), len(normed_MH))])
            return drafts[-1]

        *_, last_MH = self.unroll(batch, places, num_steps=num_drafts, next_tokens=own_tokens)
        own_tokens(num_drafts - 1, last_MH)
        return Proposals(places.shifted(1), torch.stack(drafts, dim=-1))

    @torch.no_grad()
    def draft(self, tokens: list[int], aux_hidden_TAD: Tensor, *, num_drafts: int) -> list[int]:
        """The plain decode: greedy drafts behind the prefix ``tokens``, whose last token the target has not read yet.

        aux_hidden_TAD: features of all tokens but that last one. One sequence, one token at a time, every key kept: slow
        and easy to check. vLLM's drafts must equal these.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        heads_per_group = attention.num_heads // attention.num_kv_heads
        device = self.kept_W.device
        embedded = self.embed(torch.tensor(tokens[1:], device=device))
        hidden = self.fuse(aux_hidden_TAD)
        positions = torch.arange(len(tokens) - 1, device=device)
        keys = values = torch.empty(0, device=device)
        drafts: list[int] = []
        for _ in range(num_drafts):
            x, residual = layer.inputs(embedded, hidden)
            key, value = layer.self_attn.keys_values(x, positions)
            keys, values = (key, value) if not drafts else (torch.cat((keys, key)), torch.cat((values, value)))
            query = layer.self_attn.queries(x, positions)
            k_SNC = keys.repeat_interleave(heads_per_group, dim=1)
            v_SNC = values.repeat_interleave(heads_per_group, dim=1)
            scores_NTS = torch.einsum("tnc,snc->nts", query, k_SNC) * attention.head_dim**-0.5
            future_TS = torch.arange(len(keys), device=device) > positions[:, None]
            weights_NTS = scores_NTS.masked_fill(future_TS, -torch.inf).softmax(-1)
            output = layer.finish(torch.einsum("nts,snc->tnc", weights_NTS, v_SNC), residual)
            normed = self.norm(output)
            drafts.append(int(self.kept_W[self.lm_head(normed[-1]).argmax()]))
            embedded = self.embed(torch.tensor(drafts[-1:], device=device))
            hidden = (normed if self.config.norm_output else output)[-1:]
            positions = positions[-1:] + 1
        return drafts


def resolve(config: Eagle3Config, num_layers: int, _mask_token: Callable[[], int]) -> Eagle3Config:
    """The config with the aux layers that a recipe may leave open; RecipeError for a target too shallow to choose them."""
    if config.aux_layers is not None:
        return config
    if num_layers < 7:
        raise RecipeError(f"aux_layers is needed: the default [2, N // 2, N - 3] means little for {num_layers} layers")
    return replace(config, aux_layers=(2, num_layers // 2, num_layers - 3))


def rebuild(saved: Saved, target: FrozenTarget | None) -> Eagle3Drafter:
    """The drafter of a run folder, with its trained weights."""
    config = build(Eagle3Config, saved.description.config, "drafter.json config")
    drafter = Eagle3Drafter(saved.description.shape, config, kept_W=saved.kept_W, target=target)
    drafter.load_state_dict(saved.weights)
    return drafter
