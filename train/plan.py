"""What a run would need, from shapes alone: parameters, memory per device, floating-point work. Nothing is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from data.conversations import DataConfig
from data.target import TargetConfig, resolve_target
from data.teacher import GROUP, check_aux_layers
from drafters.attention import EDGE
from drafters.drafter import Drafter
from drafters.layers import DrafterShape
from drafters.losses import chunk_rows
from recipes.load import locate
from train.loop import TrainConfig

GIB = 2**30


def planned_target(target: TargetConfig) -> PreTrainedConfig:
    """The target's config: from the folder the recipe keeps for planning, else from the target itself."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(locate(target.config) if target.config else resolve_target(target))
    return config


class AnyConfig(Protocol):
    """What every method's drafter config has."""

    @property
    def aux_layers(self) -> tuple[int, ...] | None: ...
    @property
    def draft_vocab_size(self) -> int | None: ...


class AnyRecipe(Protocol):
    """The sections that every method's recipe has."""

    @property
    def name(self) -> str: ...
    @property
    def target(self) -> TargetConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def train(self) -> TrainConfig: ...


Config = TypeVar("Config", bound=AnyConfig)
Contra = TypeVar("Contra", contravariant=True)
Resolve = Callable[[Config, int, Callable[[], int]], Config]
"""resolve(config, number of target layers, finder of a mask token) -> the config with nothing left open."""


class DrafterClass(Protocol[Contra]):
    """A method's drafter, not yet built."""

    def __call__(self, shape: DrafterShape, config: Contra, *, kept_W: torch.Tensor) -> Drafter: ...


@dataclass(frozen=True)
class Sizes:
    """What training one drafter takes, by shapes.

    Parameters: the target's layers, the largest of them, its other parts; the drafter. bytes_each: of the target's. tokens, drafted
    are positions of a forward, the target's and the drafter's; forwards: of a step, over all processes. Bytes of one process:
    features of a forward (a step holds those of all its forwards), the target's own forward, logits of a chunk of rows,
    activations of the drafter's layers and keys at its blocks' edges. work: FLOPs per token, of the target and the drafter.
    """

    layers: int
    largest_layer: int
    outer: int
    drafter: int
    bytes_each: int
    tokens: int
    drafted: int
    forwards: float
    features: int
    reading: int
    logits: int
    activations: int
    edges: int
    work: tuple[float, float]
    stored_per_token: int


def sizes(recipe: AnyRecipe, wanted: Config, resolve: Resolve[Config], drafter_class: DrafterClass[Config]) -> Sizes:
    """The sizes of a recipe's method; nothing is loaded."""
    target, train, config = recipe.target, recipe.train, planned_target(recipe.target)
    shape = DrafterShape.of(config)
    resolved = resolve(wanted, shape.num_target_layers, lambda: 0)
    assert resolved.aux_layers is not None
    check_aux_layers(resolved.aux_layers, shape.num_target_layers)
    with torch.device("meta"):
        drafter = drafter_class(shape, resolved, kept_W=torch.arange(resolved.draft_vocab_size or shape.vocab_size))
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    of_layers = [sum(p.numel() for p in layer.parameters()) for layer in model.get_decoder().layers]
    drafter_parameters = sum(parameter.numel() for parameter in drafter.parameters())
    bytes_each = int(getattr(torch, target.dtype).itemsize)
    tokens, per_row = train.rows_per_device * train.row_tokens, drafter.positions_per_row(train.row_tokens)
    drafted, num_states = per_row * train.rows_per_device, len(resolved.aux_layers) + 1
    width, inner, num_layers = text.hidden_size, text.intermediate_size, getattr(resolved, "num_layers", 1)
    # Kept for the backward, in a layer: what is normed, queries, keys, values, what attention gives, gate, up, their product.
    kept = 8 * width + (0 if train.gradient_checkpointing else 3 * inner)
    num_words = len(drafter.kept_W)
    # Of a block, the keys at the edges of its context, and their values, of every layer.
    size = getattr(resolved, "block_size", drafted)
    edge = EDGE * (2 if getattr(resolved, "sliding_window", None) else 1)
    edges = drafted // size * edge * 2 * shape.num_kv_heads * shape.head_dim * num_layers
    stored = train.features is not None
    # The target reads GROUP documents at a time: a layer's inner states, and the states that are kept, twice while they are copied.
    read = 0 if stored else GROUP * recipe.data.max_length * (3 * inner + 4 * width + 2 * num_states * width)
    return Sizes(
        layers=0 if stored else sum(of_layers),
        largest_layer=0 if stored else max(of_layers),
        outer=sum(p.numel() for p in model.parameters()) - sum(of_layers),
        drafter=drafter_parameters,
        bytes_each=bytes_each,
        tokens=tokens,
        drafted=drafted,
        forwards=train.rows_per_step / train.rows_per_device,
        features=tokens * num_states * width * bytes_each,
        reading=read * bytes_each,
        logits=min(drafted, chunk_rows(num_words, "cuda")) * num_words * 4 * 6,
        # What the head reads, gathered once more, and its gradient, in fp32.
        activations=drafted * (kept * num_layers * bytes_each + 3 * 4 * width),
        edges=edges * bytes_each,
        work=(0.0 if stored else 2.0 * sum(of_layers), 6.0 * drafter_parameters * drafted / tokens),
        stored_per_token=num_states * width * bytes_each,
    )


def plan(recipe: AnyRecipe, wanted: Config, resolve: Resolve[Config], drafter_class: DrafterClass[Config]) -> str:
    """A table of what training takes per device, one copy of target and drafter each."""
    found = sizes(recipe, wanted, resolve, drafter_class)
    parts = {
        f"target, {recipe.target.dtype}": (found.layers + found.outer) * found.bytes_each,
        "drafter: weights, gradients, two moments, fp32": found.drafter * 16,
        f"features of one forward ({found.tokens} tokens)": found.features,
        "the target's own forward": found.reading,
        "logits of the rows judged at once, and the target's, six times": found.logits,
        "activations of the drafter's layers": found.activations,
        "keys and values at the edges of blocks": found.edges,
    }
    lines = [f"{'target parameters':62} {(found.layers + found.outer) / 1e9:9.3f} billion"]
    lines += [f"{'drafter parameters':62} {found.drafter / 1e9:9.3f} billion"]
    lines += [f"{name:62} {size / GIB:9.2f} GiB" for name, size in parts.items()]
    lines += [f"{'sum per device':62} {sum(parts.values()) / GIB:9.2f} GiB"]
    lines += [f"{'host memory per process, train.feature_cache_gib':62} {recipe.train.feature_cache_gib:9.2f} GiB"]
    lines += [f"{'work per token: target forward + drafter':62} {sum(found.work) / 1e9:9.2f} GFLOP"]
    lines += [f"{'features on disk, if stored':62} {1_000_000 * found.stored_per_token / GIB:9.2f} GiB per million tokens"]
    return "\n".join(lines)
