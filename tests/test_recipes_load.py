"""The loader's types, errors and overrides, by hand; and every shipped recipe with the scripts that read it."""

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

import train.dflash
import train.dspark
import train.eagle3
from data.conversations import DataRecipe
from data.target import TargetConfig
from recipes.load import ROOT, RecipeError, load_recipe, parse_yaml, run_script, to_plain
from tests.conftest import call_script


@dataclass(frozen=True)
class Optim:
    lr: float = 1e-4
    schedule: Literal["cosine", "linear"] = "cosine"
    betas: tuple[float, ...] = (0.9, 0.95)


@dataclass(frozen=True)
class Small:
    name: str
    optim: Optim = Optim()
    folder: Path | None = None
    seed: int = 0
    verbose: bool = False


def load(tmp_path: Path, text: str, *overrides: str) -> Small:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return load_recipe(path, Small, overrides)


def test_values_have_their_types(tmp_path: Path) -> None:
    recipe = load(tmp_path, "name: x\nfolder: a/b\noptim: {lr: 6e-4, betas: [1, 0.5]}\n")
    assert recipe == Small("x", Optim(lr=0.0006, betas=(1.0, 0.5)), Path("a/b"))
    assert isinstance(recipe.optim.betas[0], float)


def test_overrides_come_last(tmp_path: Path) -> None:
    recipe = load(tmp_path, "name: x\noptim: {lr: 6e-4}\n", "optim.lr=3e-5", "optim.schedule=linear", "folder=null", "seed=4")
    assert recipe == Small("x", Optim(lr=3e-5, schedule="linear"), None, 4)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("name: x\noptim: {lrr: 1}\n", (), "unknown key optim.lrr; did you mean optim.lr?"),
        ("name: x\nopttim: {lr: 1}\n", (), "unknown key opttim; did you mean optim?"),
        ("name: x\nzzz: 1\n", (), "unknown key zzz; known here: name, optim, folder, seed, verbose"),
        ("name: x\n", ("optim.momentum=1",), "unknown key optim.momentum; known here: lr, schedule, betas"),
        ("name: x\n", ("seed",), "override 'seed' must look like section.key=value"),
        ("name: x\nseed: 3\n", ("seed.a=1",), "override 'seed.a=1': seed is a value, not a section"),
        ("seed: 1\n", (), "name is missing; add it to the recipe"),
        ("name: x\nseed: abc\n", (), "seed must be int, got 'abc'"),
        ("name: x\nseed: true\n", (), "seed must be int, got True"),
        ("name: x\nseed: null\n", (), "seed must be int, got None"),
        ("name: x\nverbose: 1\n", (), "verbose must be bool, got 1"),
        ("name: x\noptim: 3\n", (), "optim must be a section of keys, got 3"),
        ("name: x\noptim: {schedule: wsd}\n", (), "optim.schedule must be one of cosine, linear, got 'wsd'"),
        ("name: x\noptim: {betas: 3}\n", (), "optim.betas must be a list, got 3"),
        ("name: x\noptim: {betas: [1, b]}\n", (), "optim.betas[1] must be float, got 'b'"),
        ("name: x\nname: y\n", (), "line 2: key 'name' is given twice (first on line 1); remove one"),
        ("name: x\noptim: {lr: 1, lr: 2}\n", (), "line 2: key 'lr' is given twice (first on line 2); remove one"),
        ("name: [x\n", (), "not valid YAML"),
        ("- a\n", (), "must be a mapping of sections, got list"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        load(tmp_path, text, *overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_method_without_a_section(tmp_path: Path) -> None:
    """Its paper's settings are for servers: they are taken when asked for only."""
    (tmp_path / "r.yaml").write_text("name: r\ntarget: {model: x}\neagle3: {}\ndata: {}\n")
    with pytest.raises(RecipeError, match=r"r.yaml has no section dflash; add one \(dflash: \{\} for the paper's settings\)"):
        load_recipe(tmp_path / "r.yaml", train.dflash.Recipe)
    load_recipe(tmp_path / "r.yaml", train.eagle3.Recipe)
    load_recipe(tmp_path / "r.yaml", train.dflash.Recipe, ["dflash.drafter.num_layers=2"])


def test_missing_recipe_names_the_shipped_ones() -> None:
    with pytest.raises(RecipeError, match=r"recipe nowhere.yaml does not exist; shipped in recipes/: llama70b.yaml"):
        load_recipe(Path("nowhere.yaml"), Small)


def test_floats_of_every_spelling() -> None:
    """YAML 1.1 has no float without a dot; people write 6e-4."""
    values = parse_yaml("[6e-4, 6E+4, 1.5e3, -2e5, 1e3, .5, 12, 0x10, 1e]")
    assert values == [0.0006, 60000.0, 1500.0, -200000.0, 1000.0, 0.5, 12, 16, "1e"]
    assert [type(value) for value in values] == [float] * 6 + [int, int, str]


def test_sections_of_other_scripts_are_left_alone(tmp_path: Path) -> None:
    """Drafting methods are named after their files in drafters/; a data script skips their sections."""
    path = tmp_path / "r.yaml"
    path.write_text("name: x\neagle3: {anything: 1}\ntrain: {x: 1}\n")
    assert load_recipe(path, Small).name == "x"


def test_plain_round_trip(tmp_path: Path) -> None:
    recipe = load(tmp_path, "name: x\nfolder: a\noptim: {betas: [1]}\n")
    assert load(tmp_path, yaml.safe_dump(to_plain(recipe))) == recipe


METHODS: dict[str, Any] = {
    "eagle3": train.eagle3.Recipe,
    "dflash": train.dflash.Recipe,
    "dspark": train.dspark.Recipe,
}
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_load(path: Path) -> None:
    """Each recipe is named after its file, every data script takes it whole, and so does every method it has a section for."""
    sections = parse_yaml(path.read_text())
    readers: list[Any] = [DataRecipe]
    readers += [reader for method, reader in METHODS.items() if method in sections]
    for recipe_type in readers:
        recipe = load_recipe(path, recipe_type)
        assert recipe.name == path.stem
        assert isinstance(recipe.target, TargetConfig)
        if recipe.data.prompts is not None:
            assert all((ROOT / source.path).is_file() for source in recipe.data.prompts)


PLANNED = [(path.stem, method) for path in RECIPES for method in METHODS if method in parse_yaml(path.read_text())]


@pytest.mark.parametrize(("name", "method"), PLANNED)
def test_every_drafter_builds_on_the_meta_device(name: str, method: str, tmp_path: Path, smollm2: Path) -> None:
    """--plan, which builds the drafter from shapes alone, names sizes for each recipe and method."""
    path = ROOT / "recipes" / f"{name}.yaml"
    planned = call_script(importlib.import_module(f"train.{method}").main, str(path), "--plan", cwd=tmp_path).stdout
    assert re.search(r"^drafter parameters +\d+\.\d+ billion, fp32", planned, re.MULTILINE), planned


def test_an_interrupt_costs_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        run_script(interrupted)
    assert capsys.readouterr().err == "interrupted\n"
