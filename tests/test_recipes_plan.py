"""What a recipe fits on, by hand and for the recipes that are shipped."""

from dataclasses import replace
from pathlib import Path

import pytest

from recipes import plan
from recipes.plan import LAYOUTS, verdicts
from tests.conftest import ROOT, call_script
from train.plan import GIB, Sizes, parts

G = GIB
SIZES = Sizes(
    layers=8 * G,
    largest_layer=1 * G,
    outer=G,
    kept_rows=G,
    drafter=1 * G,
    bytes_each=2,
    bytes_in_layers=2.0,
    quantised=False,
    tokens=100,
    drafted=700,
    forwards=8.0,
    features=G,
    reading=G,
    logits=G,
    activations=2 * G,
    program=0,
    work=(1.0, 1.0),
    stored_per_token=1,
    cache=3 * G,
)


def test_parts_by_hand() -> None:
    """Of a target with 10 Gi parameters in bf16 and a drafter with 1 Gi, on four devices."""
    whole, drafter_sharded, target_sharded, both = (
        parts(SIZES, devices=4, drafter_sharded=layout.drafter_sharded, target_sharded=layout.target_sharded) for layout in LAYOUTS
    )
    assert whole == {"the target": 20 * G, "the drafter": 20 * G, "features of a step's rows": 2 * G, "a forward": 3 * G}
    assert drafter_sharded["the drafter"] == (16 / 4 + 6) * G
    assert target_sharded["the target"] == (8 / 4 + 2 + 2) * 2 * G
    assert both == {"the target": 12 * G, "the drafter": 10 * G, "features of a step's rows": 2 * G, "a forward": 3 * G}
    # In half a byte each, layers take 4 GiB, the rest its 4; on a CPU the program, and of all but the target 15 hundredths.
    small = parts(replace(SIZES, bytes_in_layers=0.5, program=G))
    assert small["the target"] == 8 * G
    assert small["the program itself, and gaps"] == pytest.approx(G + 0.15 * (16 + 8 + 3) * G)
    # Features are kept of all tokens, as far as there is room.
    for tokens, kept in ((2 * G, 2 * G), (9 * G, 3 * G)):
        assert parts(replace(SIZES, program=G), all_tokens=tokens)["features kept across epochs"] == kept
    assert "features kept across epochs" not in parts(SIZES, all_tokens=G)


def test_the_first_that_fits() -> None:
    """45 GiB whole, 35 with the drafter sharded, 37 with the target, 27 with both."""
    for memory, expected in ((50, "ddp_8.yaml"), (40, "fsdp2_8.yaml"), (30, "fsdp2_8.yaml, both"), (20, None)):
        chosen, lines = verdicts(SIZES, memory, 4)
        said = f" --num_processes 4{' target.sharded=true' * (memory == 30)}"
        assert chosen == (expected and expected.removesuffix(", both") + said)
        assert lines[-1].endswith("fits") == (expected is not None)
    assert "ddp_8.yaml --num_processes 4: 45.0 GiB each, 7.4 too many; the target takes 20.0" in verdicts(SIZES, 40, 4)[1]


def test_a_quantised_target_is_not_sharded() -> None:
    """Of one byte each, layers take 8 GiB, the rest 4: with the drafter sharded, of 10, and 5 more for a forward, that is 27."""
    assert verdicts(replace(SIZES, quantised=True, bytes_in_layers=1.0), 29, 4)[0] == "fsdp2_8.yaml --num_processes 4"
    chosen, lines = verdicts(replace(SIZES, quantised=True, bytes_in_layers=1.0), 25, 4)
    assert chosen is None
    assert [line for line in lines if "target.sharded" in line] == [
        f"{engine}_8.yaml target.sharded=true: a quantised target cannot be sharded" for engine in ("ddp", "fsdp2")
    ]


@pytest.mark.parametrize("text", ["name: [x", "- a"])
def test_a_recipe_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert "error: x.yaml" in call_script(plan.main, "x.yaml", cwd=tmp_path, expect=2).stderr


def test_llama_70b(tmp_path: Path) -> None:
    """Fits eight MI300X as it is; eight of 80 GB with the target sharded, and it says why not otherwise."""
    shown = call_script(plan.main, str(ROOT / "recipes" / "llama70b.yaml"), cwd=tmp_path).stdout
    eagle3 = shown.split("\n\n")[0].splitlines()
    assert eagle3[0].startswith("eagle3: target 70.55 billion parameters")
    mi300x, h100 = (eagle3.index(f"  8 x {name} GiB each:") for name in ("MI300X, 192", "H100, 79"))
    assert eagle3[mi300x + 1].startswith("    ddp_8.yaml: ")
    assert eagle3[mi300x + 1].endswith("fits")
    assert "too many; the target takes 131.9" in eagle3[h100 + 1]
    assert any("target.sharded=true" in line and line.endswith("fits") for line in eagle3[h100 + 1 : h100 + 5])
    assert shown.count("8 x H200") == 3, "all three methods"
    for block in shown.split("\n\n")[1:3]:  # as the head of the recipe says
        lines = block.splitlines()
        said = lines[lines.index("  8 x MI300X, 192 GiB each:") + 1 :]
        assert "too many" in said[0]
        assert next(line for line in said if line.endswith("fits")).startswith("    ddp_8.yaml target.sharded=true")


@pytest.mark.parametrize("name", ["qwen3_8b", "smollm2_cpu"])
def test_other_recipes(name: str, tmp_path: Path) -> None:
    shown = call_script(plan.main, str(ROOT / "recipes" / f"{name}.yaml"), "--tokens", "1e6", cwd=tmp_path).stdout
    assert shown.count("1.0 million tokens (as given)") == 3
    for method in shown.strip().split("\n\n"):
        assert "nothing fits" not in method.split("this CPU")[0]


def test_tied_weights_count_once(smollm2: Path, tmp_path: Path) -> None:
    """SmolLM2 has 134.5 million parameters (its card says 135M)."""
    shown = call_script(plan.main, str(ROOT / "recipes" / "smollm2_cpu.yaml"), "--tokens", "1e6", cwd=tmp_path).stdout
    assert "target 0.13 billion" in shown
