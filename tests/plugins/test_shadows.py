"""What plug-in files say is read from their text: exactly what running them says, or nothing where that is not sure."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from auditor.plugins import registry, shadows
from auditor.plugins.options import description_of, options_of, title_of

GOOD = """from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from auditor.plugins.attack import Attack
@dataclass(frozen=True)
class Mine(Attack):
    'Mine.'
    name: ClassVar[str] = 'mine'
    size: int = 3
"""


def said(cls: Any) -> tuple[Any, ...]:
    options = options_of(cls) if hasattr(cls, "__dataclass_fields__") else {}
    attributes = [getattr(cls, name, None) for name in ("needs", "claims")]
    return cls.__module__, cls.__qualname__, title_of(cls), description_of(cls), *attributes, list(options.items())


def test_what_is_read_is_what_running_the_files_says_of_every_plug_in() -> None:
    read, run = shadows.shadows(), registry.everything()
    assert {kind: list(found) for kind, found in read.items()} == {kind: list(found) for kind, found in run.items()}
    for kind, found in run.items():
        assert found
        for name, cls in found.items():
            assert said(read[kind][name]) == said(cls)


@pytest.fixture(autouse=True)
def no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plug-in files that other tests have loaded are no business of these."""
    monkeypatch.setattr(registry, "_extra", {})


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Reads a file as if it were one of our attacks; what running it says."""
    package = importlib.import_module("auditor.attacks")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(shadows, "PLACES", {"auditor.plugins.attack.Attack": "auditor.attacks"})

    def read(text: str) -> dict[str, Any]:
        (tmp_path / "mine.py").write_text(text)
        importlib.invalidate_caches()
        return shadows.shadows()["Attack"]

    yield read
    sys.modules.pop("auditor.attacks.mine", None)
    vars(package).pop("mine", None)


def test_a_new_file_is_seen_at_once(written: Callable[[str], dict[str, Any]]) -> None:
    assert options_of(written(GOOD)["mine"]) == {"size": 3}
    assert options_of(written(GOOD.replace("size: int = 3", "size: int = 4"))["mine"]) == {"size": 4}


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("(Attack)", "(Zlib)").replace("@", "from auditor.attacks.zlib import Zlib\n@"),
        GOOD + "SIZE = 5\n@dataclass(frozen=True)\nclass More(Mine):\n    'More.'\n    name: ClassVar[str] = 'more'\n"
        "    both: tuple = (SIZE, -1)\n    far: float = 1e-5\n",
        GOOD.replace("(Attack)", "(there.SamplingAttack)").replace("@", "import auditor.plugins.attack as there\n@"),
        GOOD.replace("@dataclass(frozen=True)\n", ""),
    ],
)
def test_bases_values_and_imports_are_followed(text: str, written: Callable[[str], dict[str, Any]]) -> None:
    read, run = written(text), registry.attacks()
    assert list(read) == list(run) and "mine" in read
    assert [said(cls) for cls in read.values()] == [said(cls) for cls in run.values()]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (GOOD.replace("= 3", "= max(3, 4)"), "max"),
        (GOOD.replace("'mine'", "'mi' + 'ne'.lower()"), "lower"),
        (GOOD + "Mine.name = 'yours'\n", "Mine.name"),
        (GOOD + "for size in (1, 2):\n    Mine.size = size\n", "for size"),
        (GOOD + GOOD.replace("Mine", "Yours"), "two plug-ins"),
        (GOOD.replace("    'Mine.'\n", ""), "docstring"),
        (GOOD.replace("@dataclass", "@print\n@dataclass"), "print"),
        (GOOD.replace("(Attack)", "(Attack, dict)"), "dict"),
        (GOOD.replace("    size: int = 3", "    @property\n    def needs(self):\n        return ()"), "needs"),
        (GOOD.replace("size: int = 3", "size: int = unheard_of"), "unheard_of"),
        (GOOD.replace("class Mine(Attack)", "class Mine(type(Attack()))"), "type"),
        (GOOD + "class (", "invalid syntax"),
    ],
)
def test_what_only_running_a_file_can_tell_is_not_guessed(
    text: str, why: str, written: Callable[[str], dict[str, Any]]
) -> None:
    with pytest.raises(shadows.Unreadable, match=why):
        written(text)
