"""Complete names of plug-ins and their options in a shell. Built-in plug-ins are read from a
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from auditor.commands import console
from auditor.plugins.catalogue import load_plugin_classes
from auditor.plugins.options import describe_plugin, get_option_defaults


def complete_plugins(*kinds: str, options: bool = False) -> Callable[[], Iterator[tuple[str, str]]]:
    """Return a function for typer, which yields names and descriptions of plug-ins of these kinds.

    If `options` is True, it yields texts such as `ethicist.samples=`.
    """

    def complete() -> Iterator[tuple[str, str]]:
        known = load_plugin_classes(console.silence_libraries)
        for kind in kinds:
            for name, cls in known[kind].items():
                if not options:
                    yield name, describe_plugin(cls)
                    continue
                for option in get_option_defaults(cls):
                    yield f"{name}.{option}=", ""

    return complete
