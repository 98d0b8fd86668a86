"""Which machine and which configuration a recipe fits on, why others do not, and how long it takes there. Nothing is loaded.

    python recipes/plan.py recipes/llama70b.yaml
    python recipes/plan.py recipes/llama70b.yaml --devices 16 --tokens 500e6

Memory is counted from shapes, of which six hundredths of a device are left free. Time is the work at a third of the
vendors' dense bf16 figures, which well-kept training reaches; of this machine's CPU, at what a matrix product reaches here.
"""

import importlib
import math
from typing import Any, NamedTuple

import psutil
import torch
import yaml

from recipes.load import RecipeError, load_recipe, recipe_arguments, run_script
from train.plan import GIB, Sizes, sizes
from train.work import matmul_peak

USABLE, UTILISATION = 0.94, 0.33


class Device(NamedTuple):
    """memory_gib: as torch reports it. flops: dense bf16, from the vendor's sheet, times UTILISATION."""

    memory_gib: float
    flops: float


DEVICES = {
    "MI300X": Device(192, 1307e12 * UTILISATION),
    "MI325X": Device(256, 1307e12 * UTILISATION),
    "MI355X": Device(288, 2516e12 * UTILISATION),
    "H100": Device(79, 989e12 * UTILISATION),
    "H200": Device(140, 989e12 * UTILISATION),
}


class Layout(NamedTuple):
    """A way to lay a run out: accelerate's file, and what else to say."""

    file: str
    more: str
    drafter_sharded: bool
    target_sharded: bool


LAYOUTS = (
    Layout("ddp_8.yaml", "", False, False),
    Layout("fsdp2_8.yaml", "", True, False),
    Layout("ddp_8.yaml", " target.sharded=true", False, True),
    Layout("fsdp2_8.yaml", " target.sharded=true", True, True),
)


def parts(found: Sizes, layout: Layout, devices: int) -> dict[str, float]:
    """Bytes of one device, by what they are for."""
    target = found.layers + found.outer
    if layout.target_sharded:
        # A part of every layer, and one of them gathered, twice while it is unpacked.
        target = found.layers // devices + found.outer + 2 * found.largest_layer
    # fp32 weights, gradients and two moments; besides, the buckets that are reduced, or what is gathered for a step.
    drafter = found.drafter * (16 / devices + 6 if layout.drafter_sharded else 20 if devices > 1 else 16)
    forwards = math.ceil(found.forwards / devices)  # of a step, on each device
    forward = forwards * found.features + max(found.reading, found.logits + found.activations + found.edges)
    return {"the target": target * found.bytes_each, "the drafter": drafter, "a forward": forward}


def verdicts(found: Sizes, memory_gib: float, devices: int) -> tuple[str | None, list[str]]:
    """The first layout that fits, as arguments for accelerate launch; and a line for each that was looked at."""
    lines = []
    for layout in LAYOUTS if devices > 1 else LAYOUTS[:1]:
        taken = {name: size / GIB for name, size in parts(found, layout, devices).items()}
        total, most = sum(taken.values()), max(taken, key=lambda name: taken[name])
        number = "" if devices == 8 else f" --num_processes {devices}"
        said = f"{layout.file}{number}{layout.more}" if devices > 1 else "one process"
        if total <= USABLE * memory_gib:
            lines.append(f"{said}: {total:.1f} GiB each, fits")
            return said, lines
        lines.append(f"{said}: {total:.1f} GiB each, {total - USABLE * memory_gib:.1f} too many; {most} takes {taken[most]:.1f}")
    return None, lines


def tokens_of(recipe: Any) -> tuple[float, str]:
    """Tokens of one epoch, and how they are known."""
    data = recipe.data
    if data.prompts is None and not data.answered:
        count = data.synthesis.num_prompts
        return count * data.max_length / 2, f"{count} conversations, taken to be half of data.max_length each"
    raise RecipeError("how many tokens the data has is not known here; give --tokens")


def main() -> None:
    parser = recipe_arguments(__doc__)
    parser.add_argument("--devices", type=int, default=8, help="GPUs; default %(default)s")
    parser.add_argument("--tokens", type=float, help="tokens of the training data, for the time")
    arguments = parser.parse_args()
    methods = ["eagle3"]  # whose script says what is wrong with a file that cannot be read
    if arguments.recipe.is_file():
        methods = [name for name in ("eagle3", "dflash", "dspark") if name in (yaml.safe_load(arguments.recipe.read_text()) or {})]
    if not methods:
        raise RecipeError(f"{arguments.recipe} has no section of a method (eagle3, dflash, dspark); add one")
    for method in methods:
        script = importlib.import_module(f"train.{method}")
        recipe = load_recipe(arguments.recipe, script.Recipe, arguments.overrides)
        section = getattr(recipe, method)
        drafter_class = next(getattr(script, name) for name in dir(script) if name.lower() == f"{method}drafter")
        found = sizes(recipe, section.drafter, script.resolve, drafter_class)
        print("\n".join(report(recipe, method, found, section.optim.epochs, arguments.devices, arguments.tokens)) + "\n")


def report(recipe: Any, method: str, found: Sizes, epochs: int, devices: int, tokens: float | None) -> list[str]:
    """The lines of one method."""
    total, known = (tokens, "as given") if tokens else tokens_of(recipe)
    lines = [
        f"{method}: target {(found.layers + found.outer) / 1e9:.2f} billion parameters, drafter {found.drafter / 1e9:.3f}",
        f"  {total / 1e6:.0f} million tokens ({known}), {epochs} epochs",
        f"  a store of features takes {total * found.stored_per_token / GIB:.0f} GiB",
        f"  {sum(found.work) / 1e9:.1f} GFLOP a token: {found.work[0] / sum(found.work):.0%} the target's forward",
    ]
    machines = {f"{devices} x {name}": (device, devices) for name, device in DEVICES.items()}
    memory, peak = psutil.virtual_memory().total / GIB, matmul_peak(torch.device("cpu"), torch.float32)
    machines["this CPU"] = (Device(memory, peak), 1)
    for name, (device, count) in machines.items():
        chosen, said = verdicts(found, device.memory_gib, count)
        lines += [f"  {name}, {device.memory_gib:.0f} GiB each:", *(f"    {line}" for line in said)]
        if chosen is None:
            lines.append("    nothing fits: lower train.row_tokens or rows_per_device, take more devices, or store features")
            continue
        rate = count * device.flops / sum(found.work)
        lines.append(f"    some {rate:.0f} tokens/s, {total * epochs / rate / 3600:.1f} hours")
    return lines


if __name__ == "__main__":
    run_script(main)
