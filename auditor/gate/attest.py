"""Build an in-toto statement (v1) about a run or an erasure, and verify a folder against one.

The statement's subject lists every file of the models, or of the stores, with its SHA-256. The
statement's predicate holds digests of the data, the plan, the result and the decision, the tool and
the date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from auditor import __version__
from auditor.core.errors import AuditError
from auditor.core.jsonable import from_json, read_json_object
from auditor.gate import dsse
from auditor.gate.decision_log import KeptDecision, load_gate_decisions
from auditor.gate.rulings import Ruling, make_gate_ruling
from auditor.records import manifest, result_file
from auditor.records.attacked_secrets import PLAN

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:audit-lm:leakage-audit:v1"
ERASURE = "erasure.json"  # of `audit erase -o FOLDER`
ERASURE_PREDICATE = "urn:audit-lm:erasure:v1"
SIGNED = "the attestation is signed and fits the run"


def build_run_statement(folder: Path) -> dict[str, Any]:
    """Build the statement about a finished run: digests of its files, as JSON values.

    Raise AuditError if the run read no weight files, or if its files were edited since it ended.
    """
    result = result_file.read_result(folder)
    if not result.weights:
        raise AuditError(
            f"expected a run about a model in files, got {str(folder)!r}, which names no weights, "
            "so the model of its numbers is unknown"
        )
    for edit in (manifest.find_folder_edits(folder) or manifest.NO_EDITS).describe_edits():
        raise AuditError(f"expected a run as it was when it ended, got {str(folder)!r}: {edit}")
    decisions = load_gate_decisions(folder)
    files = manifest.read_gate_digests(folder)
    facts = {
        "created": result.created,
        "data": {"digest": result.benchmark.digest, "members": result.benchmark.members},
        "plan": {"sha256": files.get(PLAN)},
        "result": {"sha256": files[result_file.RESULT]},
        "decision": None,
    }
    if decisions:
        facts["decision"] = _describe_attested_decision(decisions[-1])
    tool = {"version": result.tool_version}
    return _build_statement(folder, PREDICATE, result.weights, tool, facts)


def build_erasure_statement(folder: Path) -> dict[str, Any]:
    """Build the statement about the files that `audit erase` examined.

    Raise AuditError if `audit erase` examined a model without weight files.
    """
    stated = read_json_object(folder / ERASURE, "an erasure")
    digests = _read_erasure_digests(folder)
    files = "\n".join(["", *digests])
    for name in stated.get("facts", ()):
        if name.startswith("model:") and f"\n{name}/" not in files:
            raise AuditError(
                f"expected an erasure of files, got one of {name!r}, of which no weights are "
                "known: audit a local folder"
            )
    facts = {"decision": {"verdict": stated.get("verdict")}}
    return _build_statement(folder, ERASURE_PREDICATE, digests, {}, facts)


def _build_statement(
    folder: Path,
    predicate_type: str,
    digests: Mapping[str, str],
    tool: Mapping[str, str],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    predicate = {
        "tool": {"name": "audit-lm", **tool, "attestedWith": __version__},
        "attested": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": manifest.read_gate_digests(folder),
        **facts,
    }
    return {
        "_type": STATEMENT,
        "subject": _list_attested_files(digests),
        "predicateType": predicate_type,
        "predicate": predicate,
    }


def _read_erasure_digests(folder: Path) -> dict[str, str]:
    stated = read_json_object(folder / ERASURE, "an erasure")
    return from_json(dict[str, str], stated.get("digests"), str(folder / ERASURE))


def build_attestation(folder: Path, key: Path | None) -> str:
    """Return the statement as JSON, in a signed envelope if a private key is given."""
    if (folder / ERASURE).is_file():
        statement = build_erasure_statement(folder)
    else:
        statement = build_run_statement(folder)
    text = json.dumps(statement, indent=1, sort_keys=True, allow_nan=False)
    if key is None:
        return text
    return dsse.sign_payload_into_dsse_envelope(text.encode(), key)


def judge_attestation(folder: Path, attestation: Path, key: Path) -> Ruling:
    """Return a held ruling if the key signed the folder's current run and weights.

    A ruling is a verdict with its reason. If the key did not sign them, the ruling is failed. Raise
    AuditError for an invalid attestation or key file.

    Args:
        folder: folder of the run.
        attestation: file of the signed statement about the run.
        key: public key of the signer.
    """
    try:
        text = attestation.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AuditError(
            f"{attestation}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    try:
        payload, keyid = dsse.verify_dsse_envelope(text, key)
    except dsse.NoValidSignature as refusal:
        return make_gate_ruling(f"attestation: {attestation}: {refusal}", SIGNED)
    # read only the verified payload: nobody signed the text around it
    mismatch = next(_find_attestation_mismatches(folder, json.loads(payload)), "")
    if mismatch:
        return make_gate_ruling(
            f"attestation: {attestation} does not fit the run: {mismatch}", SIGNED
        )
    signed = f"signed by the key {keyid[:16]}…, and every file of the run is unchanged since"
    return make_gate_ruling(f"attestation: {signed}", SIGNED, "held")


def _find_attestation_mismatches(folder: Path, stated: Any) -> Iterator[str]:
    """Yield a sentence for each difference between the folder and a signed statement.

    Raise AuditError for a folder without a result.

    Args:
        folder: folder of the run.
        stated: the statement as JSON values.
    """
    is_erasure = (folder / ERASURE).is_file()
    predicate_type = PREDICATE
    if is_erasure:
        predicate_type = ERASURE_PREDICATE
    if not isinstance(stated, dict) or stated.get("_type") != STATEMENT:
        yield "it is not an in-toto statement of version 1"
    elif stated.get("predicateType") != predicate_type:
        kind = stated.get("predicateType")
        yield (
            f"its predicate type is {kind!r}, not {predicate_type!r}: attest the run again if "
            "audit made it"
        )
    else:
        predicate = stated.get("predicate")
        if isinstance(predicate, dict):
            files = predicate.get("files")
        else:
            files = None
        if not isinstance(files, dict) or not {result_file.RESULT, ERASURE} & set(files):
            yield "it names no files of a run"
            return
        now = manifest.read_gate_digests(folder)
        # check both lists of files: a gate could also read a file added later
        for name in sorted({*files, *now}):
            if files.get(name) != now.get(name):
                if name in files and name in now:
                    change = "has changed"
                elif name in now:
                    change = "was added"
                else:
                    change = "is gone"
                yield f"{name} {change} since it was signed"
        if is_erasure:
            digests = _read_erasure_digests(folder)
        else:
            digests = result_file.read_result(folder).weights
        if stated.get("subject") != _list_attested_files(digests):
            yield "its subject is another model"


def _list_attested_files(digests: Mapping[str, str]) -> list[dict[str, Any]]:
    files = []
    for name, digest in sorted(digests.items()):
        files.append({"name": name, "digest": {"sha256": digest}})
    return files


def _describe_attested_decision(recorded: KeptDecision) -> dict[str, Any]:
    decision = recorded.decision
    rulings = []
    for r in decision.rulings:
        rulings.append(
            {"row": r.cell_title, "rule": r.rule, "verdict": r.verdict, "reason": r.reason}
        )
    return {
        "decided": recorded.decided,
        "verdict": decision.verdict,
        "baseline": decision.baseline,
        "rulings": rulings,
    }
