"""What a run would need, from shapes alone: parameters, memory per device, floating-point work. Nothing is loaded.

eval/bench.py plan holds it beside what training takes on a CPU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from transformers import AutoConfig, PreTrainedConfig

from data.conversations import DataConfig
from data.documents import prepared_tokens
from data.target import TargetConfig, resolve_target
from data.target_model import quantisation, target_sizes
from data.teacher import GROUP, check_aux_layers
from drafters.attention import EDGE
from drafters.block import BlockDrafter
from drafters.drafter import Drafter, num_weights
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


PROGRAM = 0.62 * GIB
"""What a process on a CPU takes before it holds any model: Python, torch, transformers, the tokenizer."""
UNUSED = 0.15
"""Of what a CPU's tensors of a step take, that much more lies between them, given back but not to the system."""


@dataclass(frozen=True)
class Sizes:
    """What training one drafter takes, by shapes.

    Parameters: the target's layers, the largest of them, its other parts, a copy of its head's kept rows; the drafter. bytes_each:
    of a number that the target computes, bytes_in_layers: of a weight of its layers. tokens, drafted: positions of a forward, the
    target's and the drafter's; forwards: of a step, over all processes. Bytes of one process: features of a forward (a step holds
    those of all its forwards), the target's own forward, logits of a chunk of rows, activations of the drafter's layers with keys
    at its blocks' edges; the program itself; the most of the cache for features, in the host's memory. work: FLOPs per token, of
    the target and the drafter.
    """

    layers: int
    largest_layer: int
    outer: int
    kept_rows: int
    drafter: int
    bytes_each: int
    bytes_in_layers: float
    quantised: bool
    tokens: int
    drafted: int
    forwards: float
    features: int
    reading: int
    logits: int
    activations: int
    program: int
    work: tuple[float, float]
    stored_per_token: int
    cache: int


def sizes(
    recipe: AnyRecipe,
    wanted: Config,
    resolve: Resolve[Config],
    drafter_class: DrafterClass[Config],
    *,
    supervised: float,
    device: str = "cuda",
) -> Sizes:
    """The sizes of a recipe's method; nothing is loaded. supervised: share of the tokens that the target answered with."""
    target, train, config = recipe.target, recipe.train, planned_target(recipe.target)
    shape, text = DrafterShape.of(config), config.get_text_config()
    resolved = resolve(wanted, shape.num_target_layers, lambda: 0)
    assert resolved.aux_layers is not None
    check_aux_layers(resolved.aux_layers, shape.num_target_layers)
    with torch.device("meta"):
        drafter = drafter_class(shape, resolved, kept_W=torch.arange(resolved.draft_vocab_size or shape.vocab_size))
    of_layers, outer, work = target_sizes(config)
    stored = train.features is not None
    bytes_each = int(getattr(torch, target.dtype).itemsize)
    # Of an answer that was not greedy, all of the head says which token would have been.
    judged = 0.0 if recipe.data.answers.temperature == 0 and not recipe.data.answered else supervised
    tokens, num_words, num_states = train.rows_per_device * train.row_tokens, len(drafter.kept_W), len(resolved.aux_layers) + 1
    places = train.rows_per_device * drafter.places_per_row(supervised * train.row_tokens)
    drafted, labels = places * drafter.num_queries, places * drafter.num_drafts
    judges = min(labels, supervised * tokens)
    width, inner = text.hidden_size, text.intermediate_size
    # The target reads GROUP documents at a time: a layer's inner states, and the states that are kept, twice while they are copied;
    # then its head finds what is most likely of 256 of them.
    reading = GROUP * recipe.data.max_length * (3 * inner + 4 * width + 2 * num_states * width) + 256 * text.vocab_size
    return Sizes(
        layers=0 if stored else sum(of_layers),
        largest_layer=0 if stored else max(of_layers),
        outer=outer,
        kept_rows=num_words * width * (num_words < text.vocab_size),
        drafter=num_weights(drafter),
        bytes_each=bytes_each,
        bytes_in_layers=bytes_of_quantised(config, device) or bytes_each,
        quantised=quantisation(config) is not None,
        tokens=tokens,
        drafted=round(drafted),
        forwards=train.rows_per_step / train.rows_per_device,
        features=tokens * num_states * width * bytes_each,
        reading=0 if stored else reading * bytes_each,
        logits=round(min(labels, chunk_rows(num_words, device)) * num_words * 4 * 6),
        activations=activations(drafter, shape, train, tokens=tokens, places=places, bytes_each=bytes_each),
        program=round(PROGRAM) if device == "cpu" else 0,
        work=(
            0.0 if stored else work + 2.0 * judged * text.vocab_size * width,
            drafter.work.of(tokens=tokens, places=places, labels=labels, judges=judges) / tokens,
        ),
        stored_per_token=num_states * width * bytes_each,
        cache=0 if stored else round(train.feature_cache_gib * GIB),
    )


def activations(drafter: Drafter, shape: DrafterShape, train: TrainConfig, *, tokens: int, places: float, bytes_each: int) -> int:
    """Bytes that a drafter's forward keeps for its backward, and the most that this makes at once."""
    width, inner, num_layers, edge, at_once = shape.hidden_size, shape.intermediate_size, 1, 0, places
    if isinstance(drafter, BlockDrafter):
        num_layers, at_once = drafter.backbone.num_layers, places * drafter.num_queries
        # Of a block, the keys at the edges of its context, and their values, of every layer.
        edge = EDGE * (1 if drafter.backbone.sliding_window is None else 2) * 2 * shape.num_kv_heads * shape.head_dim
    # By each position of a layer: what is normed, queries, keys, values, what attention gives, in fp32, where autocast makes no
    # products of half precision; gate, up, their product. In a pass of the layers, the gradients of these.
    kept = 12 * 4 * width + (0 if train.gradient_checkpointing else 4 * inner * bytes_each)
    found = num_layers * (places * drafter.num_queries * kept + places * edge * bytes_each) + at_once * 4 * inner * bytes_each
    # By each token of the row: embedding, features. By each label: what the head reads, gathered once more, and its gradient.
    return round(found + 6 * 4 * width * tokens + places * drafter.num_drafts * 3 * 4 * width)


def bytes_of_quantised(config: PreTrainedConfig, device: str) -> float | None:
    """Bytes of a weight of a quantised target's layers, its scales included; None where it is unpacked, or not known."""
    how = quantisation(config) or {"quant_method": None}
    if how["quant_method"] == "fp8" and device != "cpu":
        return 1.0
    if how["quant_method"] in ("gptq", "awq"):
        bits, group = int(how.get("bits", 4)), int(how.get("group_size", 128))
        return (bits + (16 + bits) / group if group > 0 else bits) / 8
    return None


def parts(
    found: Sizes, *, devices: int = 1, drafter_sharded: bool = False, target_sharded: bool = False, all_tokens: float = 0.0
) -> dict[str, float]:
    """Bytes of one device, by what they are for. all_tokens: of the data, which a CPU's cache for features may hold."""
    layers = float(found.layers)
    if target_sharded:  # a part of every layer, and one of them gathered, twice while it is unpacked
        layers = found.layers // devices + 2 * found.largest_layer
    # fp32 weights, gradients and two moments; besides, the buckets that are reduced, or what is gathered for a step.
    drafter = found.drafter * (16 / devices + 6 if drafter_sharded else 20 if devices > 1 else 16)
    forwards = math.ceil(found.forwards / devices)  # of a step, on each device
    taken = {
        "the target": layers * found.bytes_in_layers + (found.outer + found.kept_rows) * found.bytes_each,
        "the drafter": drafter,
        "features of a step's rows": float(forwards * found.features),
        # One after the other.
        "a forward": float(max(found.reading, found.logits + found.activations)),
    }
    if found.program:
        gaps = UNUSED * sum(size for name, size in taken.items() if name != "the target")
        if cached := min(found.cache, all_tokens * found.stored_per_token):
            taken["features kept across epochs"] = cached
        taken["the program itself, and gaps"] = found.program + gaps
    return taken


def plan(recipe: AnyRecipe, wanted: Config, resolve: Resolve[Config], drafter_class: DrafterClass[Config]) -> str:
    """A table of what training takes, alone on a device of those here; recipes/plan.py says it of several."""
    device = "cuda" if torch.accelerator.is_available() else "cpu"
    supervised, known = supervised_share(recipe)
    found = sizes(recipe, wanted, resolve, drafter_class, supervised=supervised, device=device)
    lines = [f"{'target parameters':58} {(found.layers + found.outer) / 1e9:9.3f} billion, {recipe.target.dtype}"]
    lines += [f"{'drafter parameters':58} {found.drafter / 1e9:9.3f} billion, fp32 with gradients and two moments"]
    lines += [f"{'positions of a forward: of the target, of the drafter':58} {found.tokens} and {found.drafted}; {known}"]
    taken = parts(found)
    lines += [f"{name:58} {size / GIB:9.2f} GiB" for name, size in taken.items()]
    lines += [f"{'sum, of one process that trains alone':58} {sum(taken.values()) / GIB:9.2f} GiB"]
    lines += [f"{'host memory per process, train.feature_cache_gib':58} {recipe.train.feature_cache_gib:9.2f} GiB at most"]
    lines += [f"{'work per token: target forward + drafter':58} {sum(found.work) / 1e9:9.2f} GFLOP"]
    lines += [f"{'features on disk, if stored':58} {1_000_000 * found.stored_per_token / GIB:9.2f} GiB per million tokens"]
    return "\n".join(lines)


def supervised_share(recipe: AnyRecipe) -> tuple[float, str]:
    """Share of the tokens that the target answered with, and how it is known."""
    made = prepared_tokens(recipe.name)
    if made is None:
        return 0.6, "six tenths of the tokens are taken to be the target's"
    return made[1], f"{made[1]:.0%} of the tokens are the target's"
