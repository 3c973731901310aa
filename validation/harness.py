"""Provide what all checks share: command lines, printed and saved pages, clocks and drawings.

A check is a module with a `main`; `run(main)` makes a command line from its parameters. This
module does not import `auditor` at once, because `mutants.py` loads changed modules that must not
be in memory before.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(main: Callable[..., int | None], arguments: Sequence[str] | None = None) -> int:
    """Call a check's `main` with the command line's arguments; return its exit code."""
    given = vars(flags(main).parse_args(arguments))
    return (
        main(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in given.items()
            }
        )
        or 0
    )


def flags(main: Callable[..., object]) -> argparse.ArgumentParser:
    """Return a parser with a flag for each parameter of `main`, also `-o` for `out`.

    A parameter without a default is a positional argument. The module's docstring is the help
    text. `Annotated[..., "a help"]` explains a flag; `Annotated[..., NAMES]` lists its choices. A
    tuple takes several values, a Literal one of its values, a bool none.
    """
    parser = argparse.ArgumentParser(
        description=inspect.getmodule(main).__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints = typing.get_type_hints(main, include_extras=True)
    for name, parameter in inspect.signature(main).parameters.items():
        needed = parameter.default is parameter.empty
        names = (
            [name]
            if needed
            else [f"--{name.replace('_', '-')}", *(["-o"] if name == "out" else [])]
        )
        parser.add_argument(
            *names, **({} if needed else {"default": parameter.default}), **_asked(hints[name])
        )
    return parser


def _asked(kind: Any) -> dict[str, Any]:
    """Return argparse's arguments for a parameter with this annotation."""
    if typing.get_origin(kind) is typing.Annotated:
        more = kind.__metadata__[0]
        return {"help" if isinstance(more, str) else "choices": more, **_asked(kind.__origin__)}
    if kind is bool:
        return {"action": "store_true"}
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return _asked(next(one for one in typing.get_args(kind) if one is not types.NoneType))
    if typing.get_origin(kind) is tuple:
        own = typing.get_args(kind)
        return {"nargs": "+" if own[-1] is Ellipsis else len(own), **_asked(own[0])}
    if typing.get_origin(kind) is Literal:
        return {"choices": typing.get_args(kind), "type": type(typing.get_args(kind)[0])}
    return {"type": kind}


def refuse(sentence: str) -> NoReturn:
    """End the check with a sentence, because it cannot do what was asked."""
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


class Page:
    """A Markdown page that is printed line by line, and also written to a file if one is given."""

    def __init__(self, file: Path | None = None) -> None:
        self.file, self.text = file, ""

    def say(self, text: str = "") -> None:
        print(text, flush=True)
        self.text += f"{text}\n"
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(self.text, encoding="utf-8")

    def head(self, *columns: str) -> None:
        """Print the header of a table."""
        self.say(markdown(columns, ()).rstrip("\n"))

    def row(self, *cells: object) -> None:
        self.say(line(cells))


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "".join(
        f"{one}\n" for one in (line(columns), "|---" * len(columns) + "|", *map(line, rows))
    )


def line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def share(hits: int, n: int) -> str:
    """Return the share hits / n with its Clopper-Pearson interval (95%)."""
    from auditor.statistics.intervals import clopper_pearson

    low, high = clopper_pearson(hits, n)
    return f"{hits / n:.1%} [{low:.1%}–{high:.1%}]"


def median_and_spread(values: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"


def write_rows(path: Path, rows: Iterable[object]) -> None:
    """Write rows to a JSONL file."""
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def save_svg(figure: Figure, path: Path) -> None:
    """Save a drawing so that equal drawings give equal files."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "checks"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
