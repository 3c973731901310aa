"""What a shell completes: names of plug-ins and their options. Our own are run once, and kept."""

from __future__ import annotations

from collections.abc import Iterator

from auditor.commands import console
from auditor.plugins.catalogue import catalogue
from auditor.plugins.options import description_of, options_of

ATTACKS, DEFENSES = ("Attack", "Probe"), ("Defense",)


def attacks(incomplete: str) -> list[tuple[str, str]]:
    return list(_names_starting_with(incomplete, ATTACKS))


def defenses(incomplete: str) -> list[tuple[str, str]]:
    return list(_names_starting_with(incomplete, DEFENSES))


def ways_to_train(incomplete: str) -> list[tuple[str, str]]:
    return list(_names_starting_with(incomplete, ("Trainer",)))


def plugins(incomplete: str) -> list[tuple[str, str]]:
    return list(_names_starting_with(incomplete, (*ATTACKS, *DEFENSES, "Trainer", "Benchmark")))


def attack_options(incomplete: str) -> list[str]:
    return list(_options(incomplete, ATTACKS))


def defense_options(incomplete: str) -> list[str]:
    return list(_options(incomplete, DEFENSES))


def _names_starting_with(incomplete: str, kinds: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name, cls in _classes_of_kinds(kinds).items():
        if name.startswith(incomplete):
            yield name, description_of(cls)


def _options(incomplete: str, kinds: tuple[str, ...]) -> Iterator[str]:
    """`ethicist.samples=`"""
    for name, cls in _classes_of_kinds(kinds).items():
        yield from (text for option in options_of(cls) if (text := f"{name}.{option}=").startswith(incomplete))


def _classes_of_kinds(kinds: tuple[str, ...]) -> dict[str, type]:
    known = catalogue(console.quiet)
    return {name: cls for kind in kinds for name, cls in known[kind].items()}
