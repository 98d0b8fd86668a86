"""The backbone of the block drafters DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147): a whole block in one pass.

The newest token, the anchor at position p, and S - 1 mask tokens behind it are S queries at positions p .. p+S-1. In every layer
they attend to one another and to the context: the target's fused features of positions before p, turned to keys and values by
that layer's own projections. The anchor itself is not in the context, since a server drafts before the target has read it.

    positions       :  0  1  2 ... p-1 | p       p+1    p+2
    context         :  c  c  c ...  c  |
    queries         :                  | anchor  mask   mask
    DFlash predicts :                  |         p+1    p+2        what stands at the query's own position
    DSpark predicts :                  | p+1     p+2    p+3        the token after it

Shapes: B rows, T tokens, M anchors of all rows, S queries of a block, K drafts of it, R labelled ones, A aux layers,
D = H target and drafter width, W draft vocabulary, N heads, G key-value heads, C head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from data.batch import Batch, to_device
from drafters.attention import Context, attend, block_context, own_mask
from drafters.drafter import Drafter, FrozenTarget, Proposals, Work, num_weights
from drafters.layers import MLP, Attention, DrafterShape, RMSNorm
from drafters.losses import TeacherRows
from drafters.slots import Ahead, Places, ahead, draw, newest_positions
from recipes.load import RecipeError


@dataclass(frozen=True)
class BlockConfig:
    """The backbone, as a recipe says it.

    block_size: queries of a block in training. aux_layers: ids of the target's states to read; null: five, evenly from the second
    layer to the third from the end. num_anchors: blocks per packed row, drawn anew in every step. draft_vocab_size: null keeps
    the target's vocabulary and its frozen head; else the drafter has a head of its own. mask_token_id: a token of the target's
    embedding that no text holds; null: found from the tokenizer. causal: a query sees only its own block's earlier ones.
    sliding_window: every layer sees only positions less than this many away; null: all.
    """

    num_layers: int = 5
    block_size: int = 16
    num_anchors: int = 512
    aux_layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    mask_token_id: int | None = None
    causal: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_layers", 1), ("block_size", 2), ("num_anchors", 1)):
            if getattr(self, name) < least:
                raise RecipeError(f"{name} is {getattr(self, name)}; give {least} or more")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise RecipeError(f"sliding_window is {self.sliding_window}; give 1 or more, or null for none")


Config = TypeVar("Config", bound=BlockConfig)


def resolve(config: Config, num_layers: int, mask_token: Callable[[], int]) -> Config:
    """The config with what a recipe may leave open. aux_layers: five, evenly from 2 to N - 2 of N layers (for 36: 2, 10, 18, 26,
    34). mask_token_id: what mask_token() finds."""
    aux_layers, mask_token_id = config.aux_layers, config.mask_token_id
    if aux_layers is None:
        if num_layers < 8:
            raise RecipeError(f"aux_layers is needed: five of a target's {num_layers} layers would be nearly all")
        aux_layers = tuple(round(2 + i * (num_layers - 4) / 4) for i in range(5))
    if mask_token_id is None:
        mask_token_id = mask_token()
    return replace(config, aux_layers=aux_layers, mask_token_id=mask_token_id)


class Labels(NamedTuple):
    """What a batch is learned from: M anchors, and of the K drafts behind each, R that are labelled; all int64, on the host.

    found: what stands behind the anchors. anchor_R, draft_R: the anchor and the number of a labelled draft; state_R: the place, in
    all rows one after the other, of the target's state that predicted its label, ascending; label_R: in the draft vocabulary.
    """

    anchors: Places
    found: Ahead
    anchor_R: Tensor
    draft_R: Tensor
    state_R: Tensor
    label_R: Tensor


class BlockLayer(nn.Module):
    """A Qwen3 decoder layer whose queries are a block's, with the context's keys and values beside their own."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape.hidden_size, shape, qk_norm=True)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)

    def forward(
        self,
        x_MSH: Tensor,
        positions_MS: Tensor,
        context_BTH: Tensor,
        context_positions_BT: Tensor,
        seen: Context,
        mask_MSJ: Tensor,
    ) -> Tensor:
        """seen: of the context; mask_MSJ: of its edges and of the block itself."""
        attention = self.self_attn
        normed = self.input_layernorm(x_MSH)
        shared = attention.keys_values(context_BTH, context_positions_BT)
        blocks = attention.keys_values(normed, positions_MS)
        edges = (x.flatten(0, 1).index_select(0, seen.edge_ME.flatten()).unflatten(0, seen.edge_ME.shape) for x in shared)
        own_key, own_value = (torch.cat(parts, dim=1) for parts in zip(edges, blocks, strict=True))
        query = attention.queries(normed, positions_MS)
        attended = attend(query, shared, seen.stretches, own=[(own_key, own_value)], mask_MSJ=mask_MSJ)
        x_MSH = x_MSH + attention.output(attended)
        output: Tensor = x_MSH + self.mlp(self.post_attention_layernorm(x_MSH))
        return output


class BlockDrafter(Drafter):
    """Context, block layers, and head. kept_W: int64 target ids of the draft vocabulary, ascending, on the host. target: the frozen
    target's tensors; None where only the drafter's own parameters matter."""

    kept_W: Tensor

    def __init__(
        self,
        shape: DrafterShape,
        backbone: BlockConfig,
        *,
        kept_W: Tensor,
        target: FrozenTarget | None = None,
    ) -> None:
        super().__init__()
        H = shape.hidden_size
        assert backbone.aux_layers is not None, "resolve() the config first"
        assert backbone.mask_token_id is not None, "resolve() the config first"
        if not 0 <= backbone.mask_token_id < shape.vocab_size:
            raise RecipeError(f"mask_token_id is {backbone.mask_token_id}, but the target's embedding has {shape.vocab_size} rows")
        self.backbone, self.mask_token_id = backbone, backbone.mask_token_id
        self.fc = nn.Linear(len(backbone.aux_layers) * H, H, bias=False)
        self.hidden_norm = RMSNorm(H, shape.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(backbone.num_layers))
        self.norm = RMSNorm(H, shape.rms_norm_eps)
        # A drafter that says every word has the target's own head, frozen.
        self.lm_head = nn.Linear(H, len(kept_W), bias=False) if len(kept_W) < shape.vocab_size else None
        attentions = [layer.self_attn for layer in self.layers if isinstance(layer, BlockLayer)]
        keys = sum(num_weights(attention.k_proj, attention.v_proj) for attention in attentions)
        self.num_queries = backbone.block_size
        self.work = Work(
            token=4.0 * num_weights(self.fc) + 6.0 * keys,  # the features need no gradient
            place=6.0 * backbone.block_size * num_weights(self.layers),
            label=(4.0 if self.lm_head is None else 6.0) * H * len(kept_W),
            judge=2.0 * H * len(kept_W),
        )
        # No buffer: labels are looked up on the host.
        self.target_to_draft_V = torch.full((shape.vocab_size,), -1, dtype=torch.int64, device=kept_W.device)
        self.target_to_draft_V[kept_W] = torch.arange(len(kept_W), device=kept_W.device)
        self.mask_embedding: nn.Parameter | None = None
        self.register_buffer("kept_W", kept_W, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        self.embedding_VH = None if target is None else target.embedding_VH
        self.teacher = None if target is None else target.head.rows(kept_W)

    def places_per_row(self, supervised: float) -> float:
        """See Drafter."""
        return min(supervised, self.backbone.num_anchors)

    def step_work(self, batch: Batch, labels: Labels, teacher: TeacherRows | None) -> float:
        """StepOutput.work."""
        judges = 0 if teacher is None else len(teacher.states_JD)
        places, num_labels = len(labels.anchors.row_M), len(labels.draft_R)
        return self.work.of(tokens=batch.text.tokens_BT.numel(), places=places, labels=num_labels, judges=judges)

    def context(self, aux_hidden: Tensor) -> Tensor:
        """norm(fc(features)) [..., H] of aux hidden states [..., A, D]."""
        normed: Tensor = self.hidden_norm(self.fc(aux_hidden.flatten(-2).to(self.fc.weight.dtype)))
        return normed

    def block_inputs(self, anchor_tokens: Tensor, *, num_queries: int) -> Tensor:
        """Embeddings [..., S, H] of the anchor tokens [...] and S - 1 masks behind each."""
        assert self.embedding_VH is not None, "this drafter was built without its target's tensors"
        anchor_tokens = to_device(anchor_tokens, self.embedding_VH.device)
        masks = torch.full((*anchor_tokens.shape, num_queries - 1), self.mask_token_id, device=anchor_tokens.device)
        tokens = torch.cat((anchor_tokens[..., None], masks), dim=-1)
        embedded = nn.functional.embedding(tokens, self.embedding_VH).to(self.fc.weight.dtype)
        if self.mask_embedding is None:
            return embedded
        # As vLLM has it: an anchor that happens to be this token, too.
        return torch.where((tokens == self.mask_token_id)[..., None], self.mask_embedding.to(embedded.dtype), embedded)

    def run_blocks(self, batch: Batch, anchors: Places, *, num_queries: int) -> Tensor:
        """What the head reads, [M, S, H], of a block behind every anchor."""
        text, window, device = batch.text, self.backbone.sliding_window, batch.aux_hidden_BTAD.device
        seen = block_context(text.document_ids_BT, anchors, num_queries=num_queries, window=window)
        own_SS = own_mask(num_queries, causal=self.backbone.causal, window=window)
        mask_MSJ = to_device(torch.cat((seen.mask_MSE, own_SS.expand(len(seen.mask_MSE), -1, -1)), dim=-1), device)
        seen = seen._replace(edge_ME=to_device(seen.edge_ME, device))
        positions_MS = to_device(anchors.of(text.positions_BT)[:, None] + torch.arange(num_queries), device)
        positions_BT = to_device(text.positions_BT, device)
        context_BTH = self.context(batch.aux_hidden_BTAD)
        x_MSH = self.block_inputs(anchors.of(text.tokens_BT), num_queries=num_queries)
        for layer in self.layers:
            x_MSH = layer(x_MSH, positions_MS, context_BTH, positions_BT, seen, mask_MSJ)
        normed: Tensor = self.norm(x_MSH)
        return normed

    def logits(self, normed: Tensor) -> Tensor:
        """Draft logits [R, W] of rows [R, H] that run_blocks() gives; without gradient, where the head is the target's. Of that
        only the weights, as vLLM has it: no bias, no scale, no soft cap."""
        if self.lm_head is not None:
            own: Tensor = self.lm_head(normed)
            return own
        assert self.teacher is not None, "this drafter was built without its target's tensors"
        return self.teacher._replace(bias_V=None, scale=1.0, soft_cap=None).logits(normed).float()

    @torch.no_grad()
    def propose(self, batch: Batch, *, num_drafts: int) -> Proposals:
        """See Drafter; draft() is its plain twin."""
        newest = Places.where(newest_positions(batch.text))
        return Proposals(newest, self.greedy_drafts(batch, newest, num_drafts=num_drafts))

    def greedy_drafts(self, batch: Batch, newest: Places, *, num_drafts: int) -> Tensor:
        """Greedy drafts [M, K], target ids, behind the newest tokens."""
        raise NotImplementedError

    def labels(self, batch: Batch) -> Labels:
        """What the loss is over: labels of the drawn anchors, up to the end of the answer, and where the drafter can say them."""
        text = batch.text
        anchors = Places.where(draw(newest_positions(text), text.seed_B, count=self.backbone.num_anchors))
        found = ahead(text, anchors, count=self.num_drafts)
        label_MK = self.target_to_draft_V[found.tokens_MK]
        anchor_R, draft_R = (found.valid_MK & (label_MK >= 0)).nonzero(as_tuple=True)
        # Judged by the state one position before the label; equal ones side by side.
        state_R = anchors.row_M[anchor_R] * text.tokens_BT.shape[1] + found.index_MK[anchor_R, draft_R] - 1
        state_R, order_R = state_R.sort(stable=True)
        anchor_R, draft_R = anchor_R[order_R], draft_R[order_R]
        return Labels(anchors, found, anchor_R, draft_R, state_R, label_MK[anchor_R, draft_R])

    def teacher_rows(self, batch: Batch, labels: Labels) -> TeacherRows:
        """The target's states that predicted the labels, each once."""
        assert self.teacher is not None, "this drafter was built without its target's tensors"
        state_J, judge_R = labels.state_R.unique_consecutive(return_inverse=True)
        last_XD = batch.last_hidden_BTD.flatten(0, 1)
        return TeacherRows(self.teacher, last_XD.index_select(0, to_device(state_J, last_XD.device)), judge_R)

    def head_weight(self) -> Tensor:
        """The rows [W, H] of its own head, or of the target's."""
        if self.lm_head is not None:
            return self.lm_head.weight
        assert self.teacher is not None, "this drafter was built without its target's tensors"
        return self.teacher.weight_VD

    def plain_block(self, tokens: list[int], aux_hidden_TAD: Tensor, *, num_queries: int) -> Tensor:
        """What the head reads [S, H] behind the prefix ``tokens``, whose last token, the anchor, the target has not read yet.

        aux_hidden_TAD: features of all tokens but that last one. One sequence, one head at a time; slow and easy to check.
        """
        anchor = len(tokens) - 1
        device = self.kept_W.device
        context_TH = self.context(aux_hidden_TAD)
        positions = torch.arange(anchor + num_queries, device=device)
        distance_ST = positions[anchor:, None] - positions
        visible_ST = torch.ones_like(distance_ST, dtype=torch.bool)
        if self.backbone.causal:
            visible_ST &= distance_ST >= 0
        if self.backbone.sliding_window is not None:
            visible_ST &= distance_ST.abs() < self.backbone.sliding_window
        x_SH = self.block_inputs(torch.tensor(tokens[-1], device=device), num_queries=num_queries)
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            attention, normed = layer.self_attn, layer.input_layernorm(x_SH)
            query_SNC = attention.queries(normed, positions[anchor:])
            before = attention.keys_values(context_TH, positions[:anchor])
            own = attention.keys_values(normed, positions[anchor:])
            key_TGC, value_TGC = (torch.cat(parts) for parts in zip(before, own, strict=True))
            read = []
            for n in range(attention.num_heads):
                g = n // (attention.num_heads // attention.num_kv_heads)
                scores_ST = query_SNC[:, n] @ key_TGC[:, g].T * attention.head_dim**-0.5
                read.append(scores_ST.masked_fill(~visible_ST, -torch.inf).softmax(-1) @ value_TGC[:, g])
            x_SH = x_SH + attention.output(torch.stack(read, dim=1))
            x_SH = x_SH + layer.mlp(layer.post_attention_layernorm(x_SH))
        normed_SH: Tensor = self.norm(x_SH)
        return normed_SH


def pick(x_MKX: Tensor, labels: Labels) -> Tensor:
    """x [M, K, ...] of every draft, of the labelled ones: [R, ...]."""
    at_R = labels.anchor_R * x_MKX.shape[1] + labels.draft_R
    return x_MKX.flatten(0, 1).index_select(0, to_device(at_R, x_MKX.device))
