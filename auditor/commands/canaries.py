"""`audit canaries make | insert | score`: random texts into training data, and what a model made of them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from auditor.commands import console, options
from auditor.commands.options import Many
from auditor.core.errors import AuditError

if TYPE_CHECKING:
    from auditor.reports.tables import Grid
    from auditor.runs.canary_scores import CanaryScore, TargetScores

app = typer.Typer(help="Canaries: make random texts, insert them into training data, score their exposure afterwards.")
_MANIFEST = Annotated[Path, typer.Argument(help="Manifest that `audit canaries make` wrote.")]


def make(
    out: Annotated[Path, typer.Option("-o", "--out", help="Manifest to write. Keep it: it holds the answers.")],
    format: Annotated[
        Many,
        typer.Option(
            help="Text with slots: {digits:6}, {letters:4}, {upper:2}, {alnum:8}, {hex:16}, {words:3}, {name:2} of a "
            "--list; repeatable. [default: My ID is {digits:6}]"
        ),
    ] = None,
    counts: Annotated[
        str, typer.Option(metavar="1,4,16", help="How often canaries are to be inserted.")
    ] = "1,2,4,8,16",
    each: Annotated[int, typer.Option(help="Canaries of each format and count.")] = 8,
    controls: Annotated[int, typer.Option(help="Canaries of each format that are never inserted: the floor.")] = 0,
    list_: Annotated[
        Many, typer.Option("--list", metavar="NAME=FILE", help="Words for the slot {NAME}, one a line; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The canaries follow from it.")] = 0,
) -> None:
    """Draw canaries from their formats and write a manifest, readable by you only.

    A gate on the mean exposure of a count, such as `exposure(count=1) <= 10`, needs about 6 canaries of that count.
    """
    from auditor.benchmarks import canaries

    lists = dict(_list(item) for item in list_ or [])
    manifest = canaries.make(format or ["My ID is {digits:6}"], _counts(counts), each, controls, lists, seed)
    canaries.write(out, manifest)
    copies = len(manifest.copies())
    typer.echo(f"manifest: {out} ({len(manifest.canaries)} canaries, {copies} copies to insert)")


def insert(
    manifest: _MANIFEST,
    data: Annotated[str, typer.Argument(help="JSONL, CSV or Parquet file, or a Hugging Face data set.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="New file, or folder of a data set. The data stay as they are.")
    ],
    column: Annotated[str, typer.Option(help="Column of the texts.")] = "text",
    group: Annotated[
        str, typer.Option(help="Column that says whose a row is; canaries get one each. [default: none]")
    ] = "",
    seed: Annotated[int, typer.Option(help="Where the copies stand follows from it.")] = 0,
) -> None:
    """Write a copy of the data with every canary in it as often as the manifest says, as rows of their own."""
    console.quiet()
    from auditor.benchmarks import canaries, insertion

    copies = insertion.insert(insertion.Copies(canaries.read(manifest), column, group, seed), data, out)
    typer.echo(f"data: {out} ({copies} copies of canaries inserted)")


@dataclass(frozen=True, kw_only=True)
class ScoreFlags:
    """How the canaries are scored on a model: nothing of it concerns a finished run."""

    probe_options: Annotated[
        Many, typer.Option("-A", metavar="OPTION=VALUE", help="Option of the probe `exposure`: `audit list`.")
    ] = None
    lead: Annotated[
        str,
        typer.Option(metavar="auto|none|bos|eos|TEXT", help="What stands before each text; auto: the likeliest."),
    ] = "auto"
    seed: Annotated[int, typer.Option(help="References and draws follow from it.")] = 0


def score(
    manifest: _MANIFEST,
    model: Annotated[str, typer.Argument(help="Hugging Face causal LM or adapter, or the folder of a finished run.")],
    flags: ScoreFlags,
    loading: options.LoadingFlags,
    as_json: options.Json = False,
) -> None:
    """Show the exposure of every canary: on a model, or as a run has measured it. Ids and numbers, never texts.

    `audit run --model MODEL --canaries MANIFEST --attack exposure` also writes a report that a gate can judge.
    """
    console.quiet()
    from auditor.core.jsonable import to_json
    from auditor.models.loading import LoadingOptions
    from auditor.runs import canary_scores

    with console.terminal() as reporter:
        how = LoadingOptions(**options.given(loading))
        scores = canary_scores.score(manifest, model, reporter, loading=how, **options.given(flags))
    if as_json:
        typer.echo(json.dumps(to_json(scores), indent=1))
        return
    for one in scores:
        console.show(_table(one))


for command in (make, insert, score):
    app.command()(options.spelt_out(command))


def _table(score: TargetScores) -> Grid:
    from auditor.reports import words
    from auditor.reports.tables import Grid

    def cells(row: CanaryScore) -> tuple[str, ...]:
        values = row.values
        seen, low, high = (values[f"exposure_{which}bits"] for which in ("", "low_", "high_"))
        between = "" if values["exact"] else f" [{low:.1f}–{high:.1f}]"
        bits = f"{seen:.1f}{between} of {values['space_bits']:.1f}"
        p_value = words.number(values["holm_p"]) if "holm_p" in values else words.NOTHING
        return row.id, f"{row.count}", bits, words.number(values["rank"]), p_value

    head = ("canary", "inserted", "exposure, bits", "rank", "p, Holm")
    return Grid(score.title, head, tuple(cells(row) for row in score.rows), "; ".join(score.notes))


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,12}", part) for part in parts):
        raise AuditError(f"expected --counts as whole numbers with commas between them, got {text!r}")
    return [int(part) for part in parts]


def _list(item: str) -> tuple[str, tuple[str, ...]]:
    name, separator, path = item.partition("=")
    if not (separator and name.isidentifier()):
        raise AuditError(f"expected --list NAME=FILE, got {item!r}")
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AuditError(f"cannot read the words of --list {name}: {error}") from error
    words = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not words:
        raise AuditError(f"expected words in --list {name}, but {path!r} holds none: an empty space")
    return name, words
