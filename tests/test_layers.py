"""The plan of the house: which room may import which. Imports point down, and no two modules import
each other."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SIDES = ("attacks", "defenses", "benchmarks", "reports")

LEFT = "core models generation statistics privacy plugins training"  # asks the model
RIGHT = "core statistics records conclusions gate"  # reads the record
SIDE = "attacks defenses benchmarks reports"
MAY_IMPORT = {
    "core": "",
    "models": "core",
    "remote": "core models",
    "generation": "core models",
    "statistics": "core",
    "privacy": "core",
    "plugins": "core models generation statistics privacy",
    "providers": "core models remote plugins",
    "engines": "core",
    "training": "core models privacy plugins",
    "attacks": "core models generation statistics plugins benchmarks",
    "defenses": "core models privacy plugins training",
    "benchmarks": LEFT,
    "records": "core statistics",
    "conclusions": "core statistics records",
    "gate": "core statistics records conclusions",
    "reports": RIGHT,
    "runs": f"{LEFT} engines {RIGHT} {SIDE}",
    "studies": f"{LEFT} {RIGHT} engines {SIDE} runs",
    "crash": "core privacy statistics reports",
    "erasure": "core statistics benchmarks attacks records conclusions gate reports api",
    "rag": "core statistics benchmarks reports plugins providers remote",
    "api": f"{LEFT} {RIGHT} {SIDE} runs studies",
    "integrations": f"{LEFT} {RIGHT} {SIDE} runs api",
    "testing": "core models generation statistics privacy plugins defenses",
    "commands": f"{LEFT} {RIGHT} {SIDE} runs studies crash erasure rag",
    "cli": "core commands",
}
WITHOUT_TORCH = ("core", "statistics", "records", "conclusions", "gate", "reports")
# What runs, records and reports of any plug-in, and so knows none by its name.
CORE = (
    "core",
    "runs",
    "records",
    "conclusions",
    "statistics",
    "gate",
    "engines",
    "models",
    "studies",
    "reports",
)
PLUGINS = ("attacks", "defenses", "providers")
KNOWN_BY_NAME = {
    # the default of --attack, which help and reference print without an import of it
    "core.plan_parts": "ethicist",
    "studies.published_promises": "attacks.claim_check defenses.adapmixed defenses.invisible_ink "
    "defenses.pmixed "
    # what it is about
    "defenses.pmixed_model defenses.uniform_mixing pmixed adp uniform-mixing invisible-ink",
}
# Names of plug-ins that mean a kind of leakage, a score, a model's role, or nothing, where the core
# says them.
WORDS = (
    "exposure membership near-verbatim untargeted perplexity zlib lowercase reference public none "
    "lora"
)


def modules() -> dict[str, Path]:
    """`room.module` -> its file; a module that stands in no room is a room of its own."""
    found = {}
    for top in ("auditor", *SIDES):
        for path in sorted((ROOT / top).rglob("*.py")):
            below = path.relative_to(ROOT / top).with_suffix("").parts
            if path.stem != "__init__":
                found[".".join(below if top == "auditor" else (top, *below))] = path
    return found


@functools.cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a file, which nobody changes."""
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, at the top or inside a function, guarded or
    not."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def ours(path: Path) -> set[str]:
    return {name.removeprefix("auditor.") for name in imports(path)} & set(MODULES)


MODULES = modules()


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    files = {name: path for name, path in MODULES.items() if name.partition(".")[0] == room}
    assert files
    for name, path in files.items():
        reached = {other.partition(".")[0] for other in ours(path)} - {room}
        assert reached <= set(MAY_IMPORT[room].split()), f"{name} imports {reached}"


def test_every_module_stands_in_a_room() -> None:
    assert {name.partition(".")[0] for name in MODULES} == set(MAY_IMPORT)


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter({name: ours(path) for name, path in MODULES.items()}).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_who_reads_the_record_never_imports_torch() -> None:
    heavy = {"torch", "transformers", "peft"}
    for name, path in MODULES.items():
        if (
            name.partition(".")[0] in WITHOUT_TORCH and name != "core.threads"
        ):  # it measures how fast torch is
            assert not heavy & {other.partition(".")[0] for other in imports(path)}, name


def plugin_names() -> set[str]:
    """As the classes of plug-ins declare them."""
    files = [
        path.read_text() for name, path in MODULES.items() if name.partition(".")[0] in PLUGINS
    ]
    return {found for text in files for found in re.findall(r'^    name = "(.+)"', text, re.M)}


def plugins_known(path: Path, names: set[str]) -> set[str]:
    """Of these names those that a file spells, its docstrings aside, and the modules of plug-ins
    that it imports."""
    texts = {node.value for node in ast.walk(parse(path)) if isinstance(node, ast.Constant)}
    return texts & names | {name for name in ours(path) if name.partition(".")[0] in PLUGINS}


def test_the_core_knows_no_plugin_by_name() -> None:
    names = plugin_names() - set(WORDS.split())
    assert {"ethicist", "pmixed", "claim-check", "int8", "openai"} <= names
    for name, path in MODULES.items():
        if name.partition(".")[0] in CORE:
            assert plugins_known(path, names) == set(KNOWN_BY_NAME.get(name, "").split()), name


def test_few_are_handed_the_whole_plan() -> None:
    """Each part of the program is handed the part of the plan that it needs."""
    whole = {
        name for name, path in MODULES.items() if re.search(r"\bplan: Plan\b", path.read_text())
    }
    assert len({name for name in whole if name.partition(".")[0] not in ("core", "commands")}) <= 12


def test_every_room_is_installed_and_its_door_only_says_what_it_is_for() -> None:
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    packages = {name.rpartition(".")[0] for name in MODULES if "." in name}
    assert listed == {
        "auditor",
        *(f"auditor.{package}" for package in packages),
        "auditor.benchmarks",
    }
    for package in packages:
        top = ROOT if package.split(".")[0] in SIDES else ROOT / "auditor"
        door = top / package.replace(".", "/") / "__init__.py"
        tree = ast.parse(door.read_text())
        assert ast.get_docstring(tree) and len(tree.body) == 1, door
