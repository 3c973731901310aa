"""Complete names of plug-ins and their options in a shell. Built-in plug-ins are read from a
cache.
"""

from __future__ import annotations

from collections.abc import Callable

from auditor.commands import console
from auditor.plugins.catalogue import load_plugin_classes
from auditor.plugins.options import describe_plugin, get_option_defaults


def _list_plugin_classes(kinds: tuple[str, ...]) -> dict[str, type]:
    known = load_plugin_classes(console.silence_libraries)
    return {name: cls for kind in kinds for name, cls in known[kind].items()}


def _make_plugin_name_completer(*kinds: str) -> Callable[[str], list[tuple[str, str]]]:
    def complete(incomplete: str) -> list[tuple[str, str]]:
        known = _list_plugin_classes(kinds).items()
        return [(name, describe_plugin(cls)) for name, cls in known if name.startswith(incomplete)]

    return complete


def _make_plugin_option_completer(*kinds: str) -> Callable[[str], list[str]]:
    """Return a function that completes options such as `ethicist.samples=`."""

    def complete(incomplete: str) -> list[str]:
        candidates = (
            f"{name}.{option}="
            for name, cls in _list_plugin_classes(kinds).items()
            for option in get_option_defaults(cls)
        )
        return [text for text in candidates if text.startswith(incomplete)]

    return complete


# Created at import, which reads no plug-in: plug-ins are read when a shell requests them.
complete_attack_names = _make_plugin_name_completer("Attack", "Probe")
complete_attack_options = _make_plugin_option_completer("Attack", "Probe")
complete_defense_names = _make_plugin_name_completer("Defense")
complete_defense_options = _make_plugin_option_completer("Defense")
complete_training_methods = _make_plugin_name_completer("Trainer")
complete_plugin_names = _make_plugin_name_completer(
    "Attack", "Probe", "Defense", "Trainer", "Benchmark"
)
