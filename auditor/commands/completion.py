"""What a shell completes: names of plug-ins and their options. Our own are run once, and kept."""

from __future__ import annotations

from collections.abc import Callable

from auditor.commands import console
from auditor.plugins.catalogue import cached_plugin_classes
from auditor.plugins.options import description_of, options_of


def _classes_of_kinds(kinds: tuple[str, ...]) -> dict[str, type]:
    known = cached_plugin_classes(console.silence_libraries)
    return {name: cls for kind in kinds for name, cls in known[kind].items()}


def _complete_names(*kinds: str) -> Callable[[str], list[tuple[str, str]]]:
    def complete(incomplete: str) -> list[tuple[str, str]]:
        known = _classes_of_kinds(kinds).items()
        return [(name, description_of(cls)) for name, cls in known if name.startswith(incomplete)]

    return complete


def _complete_options(*kinds: str) -> Callable[[str], list[str]]:
    """Completes `ethicist.samples=`."""

    def complete(incomplete: str) -> list[str]:
        every = (f"{name}.{option}=" for name, cls in _classes_of_kinds(kinds).items() for option in options_of(cls))
        return [text for text in every if text.startswith(incomplete)]

    return complete


complete_attack_names = _complete_names("Attack", "Probe")
complete_attack_options = _complete_options("Attack", "Probe")
complete_defense_names = _complete_names("Defense")
complete_defense_options = _complete_options("Defense")
complete_training_methods = _complete_names("Trainer")
complete_plugin_names = _complete_names("Attack", "Probe", "Defense", "Trainer", "Benchmark")
