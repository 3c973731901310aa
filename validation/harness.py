"""What all checks share: flags from a signature, a page that is said and kept, a clock, a drawing.

A check is a module whose `main` says by its parameters what can be asked for: `run(main)` makes the
command line of it. Nothing of `auditor` is imported at once: `mutants.py` loads changed modules,
which must not be in memory before.
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
    """The exit code of a check, called with what the command line says."""
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
    """A flag a parameter, `-o` too for `out`; without a default it is an argument. The module's
    docstring is the help.

    `Annotated[..., "a help"]` explains it, `Annotated[..., NAMES]` says what can be chosen. A tuple
    takes several values, a Literal one of its own, a bool none.
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
    """What argparse wants to know of an annotation."""
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
    """Ends a check that was asked for what it cannot do."""
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


class Page:
    """Markdown, said line by line on the terminal, and kept in a file where there is one."""

    def __init__(self, file: Path | None = None) -> None:
        self.file, self.text = file, ""

    def say(self, text: str = "") -> None:
        print(text, flush=True)
        self.text += f"{text}\n"
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(self.text, encoding="utf-8")

    def head(self, *columns: str) -> None:
        """The head of a table."""
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
    """With its Clopper-Pearson interval (95%)."""
    from auditor.statistics.intervals import clopper_pearson

    low, high = clopper_pearson(hits, n)
    return f"{hits / n:.1%} [{low:.1%}–{high:.1%}]"


def median_and_spread(values: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"


def write_rows(path: Path, rows: Iterable[object]) -> None:
    """A JSONL file."""
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def save_svg(figure: Figure, path: Path) -> None:
    """The same drawing gives the same file."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "checks"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
