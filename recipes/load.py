"""Reads a recipe: strict YAML into frozen dataclasses, then dotted overrides.

A script owns a ``Recipe`` dataclass whose fields are the sections it reads. Sections of other scripts (each drafting
method has one, named after its file in drafters/) are left alone, and every other unknown key is an error. PyYAML alone
would read ``6e-4`` as a string and silently keep the last of two equal keys; both are mended here.
"""

import argparse
import dataclasses
import difflib
import re
import sys
import types
import typing
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

ROOT = Path(__file__).resolve().parent.parent
SHARED_SECTIONS = ("name", "target", "data", "train")

T = TypeVar("T")


class RecipeError(ValueError):
    """A mistake of the user's: shown as one line that names the key, the value seen and the fix; exit status 2."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads ``6e-4`` as a float and refuses a key given twice."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen: dict[Hashable, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if key in seen:
            raise RecipeError(f"line {line}: key {key!r} is given twice (first on line {seen[key]}); remove one")
        seen[key] = line
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _unique_mapping)


def load_recipe(path: Path, recipe_type: type[T], overrides: Sequence[str] = ()) -> T:
    """The recipe in the YAML file ``path`` as a ``recipe_type``, after ``key.subkey=value`` overrides.

    Raises RecipeError for a missing file, bad YAML, an unknown key (with the nearest known one), a duplicate key, a missing
    field, or a value of another type.
    """
    if not path.is_file():
        near = ", ".join(sorted(p.name for p in (ROOT / "recipes").glob("*.yaml")))
        raise RecipeError(f"recipe {path} does not exist; shipped in recipes/: {near}")
    try:
        raw = parse_yaml(path.read_text(encoding="utf-8"))
    except RecipeError as error:
        raise RecipeError(f"{path}, {error}") from None
    if not isinstance(raw, dict):
        raise RecipeError(f"{path} must be a mapping of sections, got {type(raw).__name__}")
    for override in overrides:
        _apply_override(raw, override)
    if "name" in raw and not re.fullmatch(r"[\w.-]+", str(raw["name"])):
        raise RecipeError(f"name is {raw['name']!r}, but folders are named after it; give letters, digits, '_', '-' and '.'")
    known = {field.name for field in dataclasses.fields(recipe_type)}  # type: ignore[arg-type]
    methods = {p.stem for p in (ROOT / "drafters").glob("*.py")} & {p.stem for p in (ROOT / "train").glob("*.py")}
    others = {*SHARED_SECTIONS, *methods} - known
    for method in methods & known - raw.keys():
        raise RecipeError(f"{path} has no section {method}; add one ({method}: {{}} for the paper's settings)")
    mine = {key: value for key, value in raw.items() if key not in others}
    return build(recipe_type, mine, "")


def parse_yaml(text: str) -> Any:
    """The YAML document ``text`` as plain Python values; RecipeError with the line on bad syntax or a duplicate key."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise RecipeError(f"{where}not valid YAML: {getattr(error, 'problem', error)}") from None


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"override {override!r} must look like section.key=value")
    *parents, last = key.split(".")
    node = raw
    for depth, part in enumerate(parents):
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise RecipeError(f"override {override!r}: {'.'.join(parents[: depth + 1])} is a value, not a section")
        node = child
    node[last] = parse_yaml(text)


def build(kind: type[T], raw: Any, where: str) -> T:
    """The dataclass ``kind`` from plain values; ``where`` names them in errors. Raises RecipeError as load_recipe does."""
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise RecipeError(f"{where} must be a section of keys, got {raw!r}")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for key in raw:
        if key not in fields:
            raise RecipeError(f"unknown key {prefix}{key}; {_suggest(str(key), list(fields), prefix)}")
    values = {}
    for name, field in fields.items():
        if name in raw:
            values[name] = _cast(hints[name], raw[name], prefix + name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if not dataclasses.is_dataclass(hints[name]):
                raise RecipeError(f"{prefix}{name} is missing; add it to the recipe")
            values[name] = build(hints[name], {}, prefix + name)
    return kind(**values)


def _suggest(key: str, known: list[str], prefix: str) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(known)}"


def _cast(hint: Any, value: Any, where: str) -> Any:
    """``value`` as the type ``hint``; ints pass as floats, lists as tuples, strings as Paths, and nothing else bends."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            if type(None) in args:
                return None
            raise RecipeError(f"{where} must not be null")
        (inner,) = [arg for arg in args if arg is not type(None)]
        return _cast(inner, value, where)
    if origin is Literal:
        if value not in args or isinstance(value, bool):
            raise RecipeError(f"{where} must be one of {', '.join(map(str, args))}, got {value!r}")
        return value
    if origin is tuple:
        if dataclasses.is_dataclass(args[0]) and isinstance(value, (str, dict)):
            value = [value]  # one of a kind needs no list
        if not isinstance(value, list):
            raise RecipeError(f"{where} must be a list, got {value!r}")
        return tuple(_cast(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise RecipeError(f"{where} must be a mapping, got {value!r}")
        return value
    if dataclasses.is_dataclass(hint):
        if isinstance(value, str):  # its first field alone
            value = {dataclasses.fields(hint)[0].name: value}
        return build(typing.cast(type[Any], hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise RecipeError(f"{where} must be {hint.__name__}, got {value!r}")
    return value


def locate(path: Path) -> Path:
    """A path that a recipe names: as it stands, from the current folder, else from this repository's root."""
    return path if path.exists() else ROOT / path


def to_plain(recipe: Any) -> Any:
    """A recipe (or any part of one) as plain dicts, lists and scalars, ready for YAML or JSON."""
    if dataclasses.is_dataclass(recipe) and not isinstance(recipe, type):
        return {field.name: to_plain(getattr(recipe, field.name)) for field in dataclasses.fields(recipe)}
    if isinstance(recipe, (tuple, list)):
        return [to_plain(item) for item in recipe]
    if isinstance(recipe, dict):
        return {key: to_plain(value) for key, value in recipe.items()}
    return str(recipe) if isinstance(recipe, Path) else recipe


def run_script(main: Callable[[], None]) -> None:
    """Runs a script's ``main``; a RecipeError becomes one line on stderr and exit status 2, Ctrl-C one and 130, as shells have it;
    anything else propagates."""
    try:
        main()
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def count(text: str) -> int:
    """A number of things on the command line: 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few; give 1 or more")
    return number


def recipe_arguments(doc: str) -> argparse.ArgumentParser:
    """A parser for the arguments every script takes: the recipe's path, then ``section.key=value`` overrides."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="a YAML file, for example recipes/smollm2_cpu.yaml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="values to set over the recipe's")
    return parser
