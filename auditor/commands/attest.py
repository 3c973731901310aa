"""`audit attest`: a signed, verifiable statement on a finished run and its model."""

from __future__ import annotations

from pathlib import Path

import typer

from auditor.core import disk
from auditor.core.errors import AuditError


def attest(
    folder: Path, *, out: Path | None = None, sign: Path | None = None, key: Path | None = None
) -> None:
    """State which model was audited, on which data, with which result and decision: in-toto, signed
    as DSSE.

    If RUN is the folder of an `audit erase -o`, the statement lists the examined files. `audit gate
    RUN --attestation FILE --key PUBLIC.pem` verifies the signature, records and model of a run.

    Args:
        folder (RUN): Run folder.
        out (-o, --out FILE): Attestation file. [default: attestation.json in RUN]
        sign (KEY.pem): Sign with this Ed25519 private key. [default: an unsigned statement]
        key (PUBLIC.pem): Verify attestation.json with this key, and write nothing; exit 1 if not
            valid.

    Examples:
        audit attest runs/latest --sign key.pem
        audit attest erasure --key key.pub.pem
    """
    from auditor.gate import attest as attestations
    from auditor.records.manifest import ATTESTATION

    path = out or folder / ATTESTATION
    if key is not None:
        if sign is not None:
            raise AuditError("expected --sign KEY.pem or --key PUBLIC.pem, got both")
        ruling = attestations.judge_attestation(folder, path, key)
        typer.echo(ruling.reason)
        raise typer.Exit(int(ruling.verdict != "held"))
    disk.replace_atomically(path, attestations.build_attestation(folder, sign))
    typer.echo(f"attestation: {path} ({'signed' if sign else 'not signed: --sign KEY.pem'})")
