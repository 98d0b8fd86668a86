"""What a run would need, from shapes alone: parameters, memory per device, floating-point work. Nothing is loaded."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from data.conversations import DataConfig
from data.target import TargetConfig, resolve_target
from data.teacher import check_aux_layers
from drafters.drafter import Drafter
from drafters.layers import DrafterShape
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


def plan(recipe: AnyRecipe, wanted: Config, resolve: Resolve[Config], drafter_class: DrafterClass[Config]) -> str:
    """A table of what training takes per device, one copy of target and drafter each."""
    target, train, config = recipe.target, recipe.train, planned_target(recipe.target)
    shape = DrafterShape.of(config)
    resolved = resolve(wanted, shape.num_target_layers, lambda: 0)
    assert resolved.aux_layers is not None
    check_aux_layers(resolved.aux_layers, shape.num_target_layers)
    with torch.device("meta"):
        drafter = drafter_class(shape, resolved, kept_W=torch.arange(resolved.draft_vocab_size or shape.vocab_size))
    text = config.get_text_config()
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    target_parameters = sum(parameter.numel() for parameter in model.parameters())
    drafter_parameters = sum(parameter.numel() for parameter in drafter.parameters())
    bytes_each = getattr(torch, target.dtype).itemsize
    tokens = train.rows_per_device * train.row_tokens
    num_states = len(resolved.aux_layers) + 1
    drafted = drafter.positions_per_row(train.row_tokens) * train.rows_per_device
    parts = {
        f"target, {target.dtype}": target_parameters * bytes_each,
        "drafter: weights, gradients, two moments, fp32": drafter_parameters * 16,
        f"features of one forward ({tokens} tokens)": tokens * num_states * text.hidden_size * bytes_each,
        f"logits of at most {drafted} positions, softmax, gradient, fp32": drafted * len(drafter.kept_W) * 12,
        f"attention scores of {drafted} positions, dense, fp32": drafted * text.num_attention_heads * train.row_tokens * 4,
    }
    lines = [f"{'target parameters':62} {target_parameters / 1e9:9.3f} billion"]
    lines += [f"{'drafter parameters':62} {drafter_parameters / 1e9:9.3f} billion"]
    lines += [f"{name:62} {size / GIB:9.2f} GiB" for name, size in parts.items()]
    lines += [f"{'sum per device':62} {sum(parts.values()) / GIB:9.2f} GiB"]
    lines += [f"{'host memory per process, train.feature_cache_gib':62} {train.feature_cache_gib:9.2f} GiB"]
    work = 2 * target_parameters + 6 * drafter_parameters * drafted / tokens
    lines += [f"{'work per token: target forward + drafter':62} {work / 1e9:9.2f} GFLOP"]
    store = 1_000_000 * num_states * text.hidden_size * bytes_each
    lines += [f"{'features on disk, if stored':62} {store / GIB:9.2f} GiB per million tokens"]
    return "\n".join(lines)
