"""What a shell completes: names of plug-ins and their options. Our own are run once, and kept."""

from __future__ import annotations

from collections.abc import Iterator

from auditor.commands import console
from auditor.plugins.catalogue import cached_plugin_classes
from auditor.plugins.options import description_of, options_of

ATTACKS, DEFENSES = ("Attack", "Probe"), ("Defense",)


def complete_attack_names(incomplete: str) -> list[tuple[str, str]]:
    return list(_names_starting_with(incomplete, ATTACKS))


def complete_defense_names(incomplete: str) -> list[tuple[str, str]]:
    return list(_names_starting_with(incomplete, DEFENSES))


def complete_training_methods(incomplete: str) -> list[tuple[str, str]]:
    return list(_names_starting_with(incomplete, ("Trainer",)))


def complete_plugin_names(incomplete: str) -> list[tuple[str, str]]:
    return list(_names_starting_with(incomplete, (*ATTACKS, *DEFENSES, "Trainer", "Benchmark")))


def complete_attack_options(incomplete: str) -> list[str]:
    return list(_option_names_starting_with(incomplete, ATTACKS))


def complete_defense_options(incomplete: str) -> list[str]:
    return list(_option_names_starting_with(incomplete, DEFENSES))


def _names_starting_with(incomplete: str, kinds: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name, cls in _classes_of_kinds(kinds).items():
        if name.startswith(incomplete):
            yield name, description_of(cls)


def _option_names_starting_with(incomplete: str, kinds: tuple[str, ...]) -> Iterator[str]:
    """`ethicist.samples=`"""
    for name, cls in _classes_of_kinds(kinds).items():
        yield from (text for option in options_of(cls) if (text := f"{name}.{option}=").startswith(incomplete))


def _classes_of_kinds(kinds: tuple[str, ...]) -> dict[str, type]:
    known = cached_plugin_classes(console.silence_libraries)
    return {name: cls for kind in kinds for name, cls in known[kind].items()}
