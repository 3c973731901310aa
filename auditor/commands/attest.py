"""`audit attest`: a signed, verifiable statement on a finished run and its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from auditor.core import disk


def attest(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Where to write it. [default: attestation.json in RUN]",
        ),
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY.pem",
            help="Sign with this Ed25519 private key. [default: an unsigned statement]",
        ),
    ] = None,
) -> None:
    """State which model was audited, on which data, with which result and decision: in-toto, signed
    as DSSE.

    `audit gate RUN --attestation FILE --key PUBLIC.pem` verifies it: the signature, every record of
    the run, the model.

    Examples:
        audit attest runs/latest --sign key.pem
    """
    from auditor.gate import attest as attestations
    from auditor.records.manifest import ATTESTATION

    path = out or folder / ATTESTATION
    disk.replace_atomically(path, attestations.write_attestation(folder, sign))
    typer.echo(f"attestation: {path} ({'signed' if sign else 'not signed: --sign KEY.pem'})")
