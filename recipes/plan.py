"""Which machine and which configuration a recipe fits on, why others do not, and how long it takes there. Nothing is loaded.

    python recipes/plan.py recipes/llama70b.yaml
    python recipes/plan.py recipes/llama70b.yaml --devices 16 --tokens 500e6

Memory is counted from shapes, of which six hundredths of a device are left free. Time is the work at a third of the
vendors' dense bf16 figures, which well-kept training reaches; on this machine's CPU, at three quarters of what a large matrix
product reaches here and now. Neither validations nor the start are in it. --json prints what is said of this CPU (bytes, tokens/s).
"""

import argparse
import functools
import importlib
import json
import math
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch

from data.documents import prepared_tokens
from recipes.load import RecipeError, count, load_recipe, parse_yaml, recipe_arguments, run_script
from train.plan import GIB, Sizes, parts, sizes, supervised_share
from train.work import matmul_peak

USABLE, UTILISATION, CPU_UTILISATION = 0.94, 0.33, 0.75


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


def verdicts(found: Sizes, memory_gib: float, devices: int, all_tokens: float = 0.0) -> tuple[str | None, list[str]]:
    """The first layout that fits, as arguments for accelerate launch; and a line for each that was looked at."""
    lines = []
    for layout in LAYOUTS if devices > 1 else LAYOUTS[:1]:
        if layout.target_sharded and found.quantised:
            lines.append(f"{layout.file}{layout.more}: a quantised target cannot be sharded")
            continue
        sharded = {"drafter_sharded": layout.drafter_sharded, "target_sharded": layout.target_sharded}
        bytes_of = parts(found, devices=devices, all_tokens=all_tokens, **sharded)
        taken = {name: size / GIB for name, size in bytes_of.items()}
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
    if (made := prepared_tokens(recipe.name)) is not None:
        return made[0], "as tokenised last"
    if data.prompts is None and not data.answered:
        number = data.synthesis.num_prompts
        return number * data.max_length / 2, f"{number} conversations, taken to be half of data.max_length each"
    raise RecipeError("how many tokens the data has is not known here; give --tokens")


def positive(text: str) -> float:
    """A number above 0 on the command line."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens; give more than 0")
    return number


def main() -> None:
    parser = recipe_arguments(__doc__)
    parser.add_argument("--devices", type=count, default=8, help="GPUs; default %(default)s")
    parser.add_argument("--tokens", type=positive, help="tokens of the training data, for the time")
    parser.add_argument("--json", action="store_true", help="print one JSON object: method -> what is said of this CPU")
    arguments = parser.parse_intermixed_args()
    said: dict[str, dict[str, float]] = {}
    methods = ["eagle3"]  # whose script says what is wrong with a file that cannot be read
    with suppress(RecipeError, OSError):
        raw = parse_yaml(arguments.recipe.read_text())
        methods = [name for name in ("eagle3", "dflash", "dspark") if name in raw] if isinstance(raw, dict) else methods
    if not methods:
        raise RecipeError(f"{arguments.recipe} has no section of a method (eagle3, dflash, dspark); add one")
    for method in methods:
        script = importlib.import_module(f"train.{method}")
        recipe = load_recipe(arguments.recipe, script.Recipe, arguments.overrides)
        section = getattr(recipe, method)
        drafter_class = next(getattr(script, name) for name in dir(script) if name.lower() == f"{method}drafter")
        share, share_known = supervised_share(recipe)
        counted = {
            device: sizes(recipe, section.drafter, script.resolve, drafter_class, supervised=share, device=device)
            for device in ("cuda", "cpu")
        }
        here, tokens = counted["cpu"], prepared_tokens(recipe.name) or (0, 0.0)
        memory = sum(parts(here, all_tokens=tokens[0]).values())
        said[method] = {"memory": memory, "tokens_per_s": this_cpu().flops / sum(here.work)}
        if not arguments.json:
            total, known = (arguments.tokens, "as given") if arguments.tokens else tokens_of(recipe)
            data = f"{total / 1e6:.1f} million tokens ({known}), {section.optim.epochs} epochs; {share_known}"
            lines = report(method, counted, arguments.devices, total=total, epochs=section.optim.epochs, data=data)
            print("\n".join(lines) + "\n")
    if arguments.json:
        print(json.dumps(said))


@functools.cache
def this_cpu() -> Device:
    """This machine without its GPUs: what it keeps up for some seconds."""
    peak = median(matmul_peak(torch.device("cpu"), torch.float32) for _ in range(30))
    return Device(psutil.virtual_memory().total / GIB, peak * CPU_UTILISATION)


def report(method: str, counted: dict[str, Sizes], devices: int, *, total: float, epochs: int, data: str) -> list[str]:
    """The lines of one method. counted: for "cuda" and for "cpu"; total: tokens of an epoch; data: what is said of them."""
    found = counted["cuda"]
    lines = [
        f"{method}: target {(found.layers + found.outer) / 1e9:.2f} billion parameters, drafter {found.drafter / 1e9:.3f}",
        f"  {data}",
        f"  a store of features takes {total * found.stored_per_token / GIB:.0f} GiB",
        f"  {sum(found.work) / 1e9:.1f} GFLOP a token: {found.work[0] / sum(found.work):.0%} the target's forward",
    ]
    machines = {f"{devices} x {name}": (device, devices, found) for name, device in DEVICES.items()}
    machines["this CPU"] = (this_cpu(), 1, counted["cpu"])
    for name, (device, number, sizes_there) in machines.items():
        chosen, said = verdicts(sizes_there, device.memory_gib, number, total)
        lines += [f"  {name}, {device.memory_gib:.0f} GiB each:", *(f"    {line}" for line in said)]
        if chosen is None:
            lines.append(
                "    nothing fits: lower train.row_tokens or rows_per_device, set train.gradient_checkpointing, take more devices, "
                "or store features"
            )
            continue
        # What is kept of the target's features is computed once.
        kept = min(1.0, number * sizes_there.cache / (total * sizes_there.stored_per_token))
        of_target, of_drafter = sizes_there.work
        work = total * (of_target * (kept + (1 - kept) * epochs) + of_drafter * epochs)
        seconds = work / (number * device.flops)
        lines.append(f"    some {total * epochs / seconds:.0f} tokens/s, {seconds / 3600:.1f} hours")
    return lines


if __name__ == "__main__":
    run_script(main)
