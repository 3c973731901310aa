"""The rooms drawn in `docs/explanation/inside.md`, from the layer test's table: `python -m
tests.docs.rooms`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.test_layers import MAY_IMPORT, SIDES, WITHOUT_TORCH, imports

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "inside.md"
BEGIN, END = "<!-- printed by tests/docs/rooms.py -->\n", "<!-- end of what is printed -->\n"
ROOMS = {room: set(below.split()) for room, below in MAY_IMPORT.items()}


def reached(room: str) -> set[str]:
    """All rooms below this one, however far."""
    return ROOMS[room].union(*(reached(below) for below in ROOMS[room]))


def arrows(room: str) -> list[str]:
    """The rooms it stands on: those it may import that no other one it may import already stands
    on."""
    below = ROOMS[room]
    return sorted(one for one in below if not any(one in reached(other) for other in below))


def printed() -> str:
    """The drawing, in Mermaid, and the table. Rooms that never import torch are drawn round."""
    shapes = [
        f"    {room}({room})\n" if room in WITHOUT_TORCH else f"    {room}[{room}]\n"
        for room in ROOMS
    ]
    lines = [f"    {room} --> {below}\n" for room in ROOMS for below in arrows(room)]
    rows = [f"| `{room}` | {purpose(room)} | {_below(room)} |\n" for room in ROOMS]
    table = ["| package | what it is for | may import |\n|---|---|---|\n", *rows]
    commands = [
        "\n| command | packages that it calls |\n|---|---|\n",
        *map(_command_row, _command_files()),
    ]
    return "".join(["```mermaid\nflowchart TD\n", *shapes, *lines, "```\n\n", *table, *commands])


def _command_files() -> list[Path]:
    """The files of commands: those that define a function of their own name, and the group
    `canaries`."""
    files = sorted((ROOT / "auditor" / "commands").glob("*.py"))
    return [
        file
        for file in files
        if re.search(rf"^(def {file.stem}(_plugins)?\(|app = )", file.read_text(), re.M)
    ]


def _command_row(file: Path) -> str:
    rooms = {
        name.split(".")[1]
        for name in imports(file)
        if name.count(".") and name.startswith("auditor.")
    }
    called = ", ".join(sorted(rooms & set(ROOMS) - {"core", "commands"}))
    return f"| `audit {file.stem.replace('_', '-')}` | {called or 'none'} |\n"


def purpose(room: str) -> str:
    """The first paragraph of what the package, or the module that is a room of its own, says of
    itself."""
    folder = ROOT / room if room in SIDES else ROOT / "auditor" / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).rstrip(".")


def _below(room: str) -> str:
    above = {*list(ROOMS)[: list(ROOMS).index(room)]}
    if len(above) > 2 and ROOMS[room] == above:
        return "all rooms above"
    return ", ".join(sorted(ROOMS[room])) or "nothing of ours"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + printed() + END + rest.partition(END)[2], encoding="utf-8")
