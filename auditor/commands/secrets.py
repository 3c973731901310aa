"""`audit secrets make`: what to attack, picked out of a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from auditor.commands import console, options
from auditor.commands.panels import PanelGroup
from auditor.core.counts import counted
from auditor.core.errors import AuditError
from auditor.core.plan import FIELDS

app = typer.Typer(cls=PanelGroup, help="Pick the texts to attack out of a corpus, personal data first of all.")


@dataclass(frozen=True, kw_only=True)
class PickingFlags:
    """What is picked."""

    panel: ClassVar[str] = "choice"

    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="email,phone,…",
            help="email, phone, iban, card, birth-date, id-number, what the column pii marks, or random: any text. "
            "[default: all personal data found]",
        ),
    ] = None
    limit: Annotated[int | None, typer.Option(help="At most N of each kind. [default: 1000]")] = None
    prefix_length: Annotated[int | None, typer.Option(help="At most N characters before a secret. [default: 200]")] = (
        None
    )
    suffix_length: Annotated[int | None, typer.Option(help="Characters of a random text. [default: 100]")] = None
    similar: Annotated[
        float | None, typer.Option(help="Of two this similar (1: equal), one is left out. [default: 0.8]")
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of the choice. [default: 0]")] = None


def make(
    data: Annotated[str, options.of_data(help="Training texts: JSONL, CSV, Parquet or a Hugging Face data set.")],
    out: Annotated[
        Path, options.out_folder(metavar="FILE.jsonl", help="New file for `audit run --data`, readable by you only.")
    ],
    picking: PickingFlags,
    heldout: Annotated[
        str | None,
        options.of_data(metavar="DATA", help="Texts not trained on: matched non-members go to FILE.nonmembers.jsonl."),
    ] = None,
    phone_region: Annotated[str | None, typer.Option(metavar="DE,US", help=FIELDS["phone_region"].help)] = None,
) -> None:
    """Pick personal data (or any text) as prefix and suffix, count repeats, and draw matched non-members.

    Examples:
        audit secrets make --data corpus.jsonl -o secrets.jsonl
        audit secrets make --data corpus.jsonl --heldout fresh.jsonl --kinds email -o secrets.jsonl
    """
    console.silence_libraries()
    from auditor.benchmarks import secret_picking as pick
    from auditor.benchmarks.whole_texts import read_texts_with_pii_marks

    others = out.with_name(f"{out.stem}.nonmembers{out.suffix}")
    if out.suffix != ".jsonl":
        raise AuditError(f"expected -o as a file ending in .jsonl, got {str(out)!r}")
    # the second even without --heldout: non-members of older secrets would pass for those of these
    for path in (out, others):
        if path.exists():
            raise AuditError(f"expected a new file for -o, but {str(path)!r} exists")
    chosen = options.given_flags(picking)
    if "kinds" in chosen:
        chosen["kinds"] = tuple(chosen["kinds"].split(","))
    asked, regions = pick.Picking(**chosen), phone_region.split(",") if phone_region else ()
    corpus = read_texts_with_pii_marks("--data", data)
    made = pick.pick_secrets(
        corpus, asked, None if heldout is None else read_texts_with_pii_marks("--heldout", heldout), regions
    )
    pick.write_picked_secrets(made, out, others)
    for note in made.notes:
        typer.echo(f"note: {note}")
    for warning in made.warnings:
        typer.echo(f"warning: {warning}")
    typer.echo(f"secrets: {out} ({counted(len(made.members), 'member')})")
    if heldout is not None:
        typer.echo(f"non-members: {others} ({len(made.nonmembers):,})")


@app.callback()
def _keep_subcommand_name() -> None:
    """So that `make` is a command of its own even while it is the only one."""


options.add_command_to_app(app, make)
