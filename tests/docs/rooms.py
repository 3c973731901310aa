"""The rooms drawn in `docs/explanation/inside.md`, from the layer test's table: `python -m tests.docs.rooms`."""

from __future__ import annotations

from pathlib import Path

from tests.test_layers import MAY_IMPORT, WITHOUT_TORCH

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "inside.md"
BEGIN, END = "<!-- printed by tests/docs/rooms.py -->\n", "<!-- end of what is printed -->\n"
FOR = {
    "core": "nouns, errors, files: what everybody stands on",
    "models": "what a language model can be asked",
    "remote": "a model behind an API: what its server really does, and what asking it costs",
    "generation": "candidates, by walking rows of a model",
    "statistics": "numbers with intervals",
    "privacy": "what may be promised, and `privacy.json`",
    "providers": "one file a provider of models: who `--model NAME:REST` asks",
    "engines": "who does the work: this process, or a cluster's workers",
    "plugins": "what you may write, and what it is handed",
    "training": "fine-tuning, private or not",
    "attacks": "one file an attack or probe",
    "defenses": "one file a defense or training method",
    "benchmarks": "what is attacked: the lab, your files, LM-Extraction arrays, canaries; `plans/` holds the papers",
    "records": "a run on disk",
    "gate": "finished runs against limits and against each other",
    "reports": "a run folder as HTML, Markdown, terminal, tables; `schema.json` is the form of `result.json`",
    "runs": "one audit: its plan, where it takes place, its targets and cells",
    "utility": "what a defense costs",
    "studies": "many runs: grids, papers, ledgers",
    "crash": "a private training loop of one's own, held against its claim",
    "api": "the Python API: an audit as a call, finished runs as tables",
    "integrations": "an audit inside a training loop",
    "testing": "the contract of plug-ins and models as tests of one line; the functions behind intervals",
    "commands": "one file a command",
    "cli": "the app and its exit codes",
}
ROOMS = {room: set(below.split()) for room, below in MAY_IMPORT.items()}


def reached(room: str) -> set[str]:
    """All rooms below this one, however far."""
    return ROOMS[room].union(*(reached(below) for below in ROOMS[room]))


def arrows(room: str) -> list[str]:
    """The rooms it stands on: those it may import that no other one it may import already stands on."""
    below = ROOMS[room]
    return sorted(one for one in below if not any(one in reached(other) for other in below))


def printed() -> str:
    """The drawing, in Mermaid, and the table. Rooms that never import torch are drawn round."""
    shapes = [f"    {room}({room})\n" if room in WITHOUT_TORCH else f"    {room}[{room}]\n" for room in ROOMS]
    lines = [f"    {room} --> {below}\n" for room in ROOMS for below in arrows(room)]
    rows = [f"| `{room}` | {FOR[room]} | {_below(room)} |\n" for room in ROOMS]
    table = ["| room | what it is for | may import |\n|---|---|---|\n", *rows]
    return "".join(["```mermaid\nflowchart TD\n", *shapes, *lines, "```\n\n", *table])


def _below(room: str) -> str:
    above = {*list(ROOMS)[: list(ROOMS).index(room)]}
    if len(above) > 2 and ROOMS[room] == above:
        return "all rooms above"
    return ", ".join(sorted(ROOMS[room])) or "nothing of ours"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + printed() + END + rest.partition(END)[2], encoding="utf-8")
