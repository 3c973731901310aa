"""What plug-ins say of themselves is kept, exactly, and made anew where a file has changed."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from auditor.plugins import catalogue, options, registry
from auditor.plugins.options import build_plugin, get_option_defaults, get_plugin_title


def quiet() -> None:
    """Nothing is said here."""


def said(cls: Any) -> tuple[Any, ...]:
    options = get_option_defaults(cls) if hasattr(cls, "__dataclass_fields__") else {}
    attributes = [getattr(cls, name, None) for name in ("needs", "claims")]
    needs = [list(a) if isinstance(a, tuple) else a for a in attributes]
    return (
        cls.__module__,
        cls.__name__,
        get_plugin_title(cls),
        inspect.getdoc(cls),
        needs,
        list(options.items()),
    )


def test_what_is_kept_is_what_the_files_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path))
    monkeypatch.setattr(registry, "_extra", {})  # plug-ins that other tests have loaded
    run = catalogue.load_plugin_classes(quiet)
    assert run == registry.list_plugin_classes()
    monkeypatch.setattr(catalogue, "_import_all_plugins", lambda before: pytest.fail("asked again"))
    kept = catalogue.load_plugin_classes(quiet)
    assert {kind: list(found) for kind, found in kept.items()} == {
        kind: list(found) for kind, found in run.items()
    }
    assert all(
        said(kept[kind][name]) == said(cls)
        for kind, found in run.items()
        for name, cls in found.items()
    )


@pytest.mark.parametrize("held", ["", "[]", '{"files": ""}', '{"files": "another"}'])
def test_what_was_kept_of_other_files_is_not_taken(
    held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path))
    (tmp_path / "plugins.json").write_text(held)
    monkeypatch.setattr(catalogue, "_import_all_plugins", lambda before: {"Attack": {}})
    assert (
        catalogue.load_plugin_classes(quiet)
        == {"Attack": {}}
        == catalogue.load_plugin_classes(quiet)
    )
    before = catalogue._plugin_source_files_fingerprint()
    monkeypatch.setattr(catalogue, "_PACKAGES", ("auditor.attacks",))
    assert catalogue._plugin_source_files_fingerprint() != before


MINE = '''
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from auditor.plugins.attack import Attack


@dataclass(frozen=True)
class Mine(Attack):
    """Guess nothing, which is a plug-in all the same."""

    name = "{name}"
    needs = ()
    depth: {kind} = 3

    def guess(self, view: Any, state: Any, queries: Any) -> Any:
        yield from ()
'''


def test_files_of_one_name_may_put_off_their_annotations(tmp_path: Path) -> None:
    """As most files do; each one's are looked up in itself."""
    for name, kind in (("whole", "int"), ("real", "float")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(MINE.format(name=name, kind=kind))
        registry.load_plugin_file(tmp_path / name / "mine.py")
    made = [
        build_plugin("attack", registry.list_attacks(), name, {"depth": "4"})
        for name in ("whole", "real")
    ]
    assert [type(one.depth) for one in made] == [int, float]  # type: ignore[attr-defined]


def test_annotations_of_a_plug_in_are_compiled_once() -> None:
    """A run makes hundreds of the same few, which took a fifteenth of a small one."""
    known = registry.list_attacks()
    build_plugin("attack", known, "ethicist", {"epochs": 1})
    before = options._resolve_annotations.cache_info().misses
    assert build_plugin("attack", known, "ethicist", {"epochs": "2"}).epochs == 2
    assert options._resolve_annotations.cache_info().misses == before
