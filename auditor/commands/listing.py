"""Format the output of `audit list`: a line per plug-in, or the details of one plug-in."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from rich.text import Text

from auditor.core.errors import refuse_unknown_names
from auditor.plugins.options import (
    describe_plugin,
    get_option_defaults,
    list_allowed_values,
)
from auditor.reports import escaping

Found = Mapping[str, Mapping[str, Any]]  # kind -> name -> class
# kind -> title, command, flag of an option, page (an attack class may name another)
_KINDS = {
    "Attack": ("attack", "audit run --attack {}", "-A", "how-to/audit-your-model"),
    "Probe": ("probe", "audit run --attack {}", "-A", "how-to/audit-your-model"),
    "Defense": ("defense", "audit run --defense {}", "-D", "how-to/defenses"),
    "Trainer": ("training", "audit train {}", "-D", "how-to/train-privately"),
    "Benchmark": ("data", "audit run", "", "how-to/audit-your-model"),
    "Provider": ("models", "audit run --model {}:NAME", "--model-arg", "how-to/write-a-plug-in"),
}
_CONTROL = "none: the control"  # claim of a target that is shown only next to another target
_GUTTER = 10
_NAME = 23


# --- all plug-ins ---


def list_overview_lines(found_plugins: Found, width: int | None) -> Iterator[Text]:
    """Yield the lines of `audit list`.

    Each attack, probe, defense and training has a line. All text forms and models share a line, as
    do all controls and all kinds of data.

    width: columns of the terminal; longer descriptions are cut at the end of a clause.
    """
    trained = found_plugins["Trainer"]
    classes = {**found_plugins["Defense"], **trained}
    controls = [name for name, cls in sorted(classes.items()) if cls.claims.startswith(_CONTROL)]
    served: dict[str, Any] = {}
    forms: dict[str, Any] = {}
    training = dict(trained)
    for name, cls in found_plugins["Defense"].items():
        # A defense that is not the class of the training with its name also serves the model: list
        # it instead of the training. Compare names: the catalogue may rebuild a class from a cache.
        other = trained.get(name)
        if other is None or (cls.__module__, cls.__name__) != (other.__module__, other.__name__):
            training.pop(name, None)
            group = forms if getattr(cls, "form", False) else served
            group[name] = cls
    for name in controls:
        served.pop(name, None)
        training.pop(name, None)
    groups = (
        ("attack", found_plugins["Attack"]),
        ("probe", found_plugins["Probe"]),
        ("defense", served),
        ("training", training),
    )
    for title, plugins in groups:
        for i, (name, cls) in enumerate(plugins.items()):
            yield _format_plugin_listing_line("" if i else title, name, describe_plugin(cls), width)
    syntax = []
    for name, cls in forms.items():
        syntax.append(name + "".join(f":{option.upper()}" for option in get_option_defaults(cls)))
    yield _format_plugin_listing_line(
        "forms", f"{', '.join(syntax)}; models {', '.join(found_plugins['Provider'])}", "", width
    )
    yield _format_plugin_listing_line("controls", ", ".join(controls), "", width)
    if found_plugins["Benchmark"]:
        yield _format_plugin_listing_line("data", ", ".join(found_plugins["Benchmark"]), "", width)
    trains = "Training methods: audit train NAME, --defense NAME, audit mitigate --by NAME."
    yield Text(f"audit list NAME: options, needs, claim, source, page. {trains}")


def _format_plugin_listing_line(title: str, name: str, summary: str, width: int | None) -> Text:
    line = Text.assemble(
        (f"{title:{_GUTTER}}", "dim"), (escaping.make_printable_line(name), "bold")
    )
    if summary:
        line.pad_right(max(1, _GUTTER + _NAME - line.cell_len))  # cells: a wide character takes two
        line.append(
            _shorten_listing(escaping.make_printable_line(summary), width and width - line.cell_len)
        )
    if width is not None:
        line.truncate(width, overflow="ellipsis")
    return line


def _shorten_listing(text: str, room: int | None) -> str:
    """Return the longest prefix of the text that fits and ends with a clause.

    Return the whole text if no such prefix fits.

    room: number of columns; None for unlimited.
    """
    if room is None or len(text) <= room:
        return text
    longest = text
    for end in re.finditer(r" \(|[;:.] ", text):
        part = text[: end.start()]
        if len(part) <= room and part.count("(") == part.count(")"):
            longest = part
    return longest


# --- one plug-in ---


def list_detail_lines(found_plugins: Found, name: str) -> Iterator[Text]:
    """Yield the details of all plug-ins with this name.

    Raise AuditError if no plug-in has the name.
    """
    matches = [(kind, plugins[name]) for kind, plugins in found_plugins.items() if name in plugins]
    refuse_unknown_names("plug-in", [name], chain.from_iterable(found_plugins.values()))
    for i, (kind, cls) in enumerate(matches):
        if i:
            yield Text()
        title, command_format, flag, page = _KINDS[kind]
        yield Text.assemble(
            (escaping.make_printable_line(name), "bold"),
            f": {title} ({command_format.format(escaping.make_printable_line(name))})",
        )
        yield from (
            Text(escaping.make_printable_line(paragraph))
            for paragraph in (inspect.getdoc(cls) or "").split("\n\n")
        )
        yield from _list_option_lines(kind, cls, flag)
        yield from _list_titled_listing_lines("source", [_find_plugin_source(cls)])
        if cls.__module__.startswith("auditor."):
            page = getattr(cls, "page", "") or page
            if name in found_plugins["Defense"]:
                page = "how-to/defenses"
            yield from _list_titled_listing_lines("page", [f"docs/{page}.md"])


def _list_option_lines(kind: str, cls: Any, flag: str) -> Iterator[Text]:
    if kind == "Benchmark":
        return
    # An audit may have several attacks and defenses; a training or a provider is single and needs
    # no name.
    name = f"{cls.name}." if kind in ("Attack", "Probe", "Defense") else ""
    allowed = list_allowed_values(cls)
    listed = []
    for option, value in get_option_defaults(cls).items():
        if isinstance(value, bool):
            value = str(value).lower()
        line = f"{flag} {name}{option}={value}"
        if option in allowed:
            line += f" ({'|'.join(map(str, allowed[option]))})"
        listed.append(line)
    yield from _list_titled_listing_lines("options", listed or ["none"])
    if kind != "Provider":
        yield from _list_titled_listing_lines(
            "needs", [", ".join(getattr(cls, "needs", ())) or "nothing"]
        )
    if kind in ("Defense", "Trainer"):
        yield from _list_titled_listing_lines("claim", [cls.claims])


def _list_titled_listing_lines(title: str, lines: Iterable[str]) -> Iterator[Text]:
    for i, line in enumerate(lines):
        yield Text.assemble(
            (f"{'' if i else title:{_GUTTER}}", "dim"), escaping.make_printable_line(line)
        )


def _find_plugin_source(cls: Any) -> str:
    # Not getfile() for bundled plug-ins: it needs the imported module, which a cached class does
    # not import.
    if cls.__module__.startswith("auditor."):
        spec = importlib.util.find_spec(cls.__module__)
    else:
        spec = None
    with suppress(TypeError):  # fails for the class of a file given by --plugin
        return (spec.origin if spec else inspect.getfile(cls)) or cls.__module__
    return cls.__module__
