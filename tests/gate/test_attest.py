"""A signed attestation fits the run that it was made of, and nothing else; what is signed is what
DSSE says."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as keys
from cryptography.hazmat.primitives.asymmetric import ed25519
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from auditor.cli import run_command_line
from auditor.core.errors import AuditError
from auditor.gate import attest, dsse
from auditor.records.table import TABLE
from tests.conftest import check_command, save_tiny
from tests.rows import repacked

Said = pytest.CaptureFixture[str]


def pair(folder: Path, name: str, seed: int) -> tuple[Path, Path]:
    """A private and a public key as openssl writes them."""
    private = ed25519.Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
    own, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    own.write_bytes(
        private.private_bytes(keys.Encoding.PEM, keys.PrivateFormat.PKCS8, keys.NoEncryption())
    )
    form = keys.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(private.public_key().public_bytes(keys.Encoding.PEM, form))
    return own, public


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that a gate has judged, two pairs of keys, and its signed attestation."""
    here = tmp_path_factory.mktemp("attest")
    save_tiny(here / "model")
    rows = [
        {"prefix": f"the locker of {i} is", "suffix": f" {i * 7919} {i * 31} {i}"} for i in range(6)
    ]
    (here / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [
        "--model",
        str(here / "model"),
        "--data",
        str(here / "data.jsonl"),
        "--prefix-length",
        "3",
    ]
    more = [
        "--suffix-length",
        "2",
        "--attack",
        "perplexity",
        "--samples",
        "2",
        "--prefix-token",
        "none",
        "--setting",
        "white-box",
    ]
    check_command("run", *data, *more, "-o", here / "run")
    check_command("gate", here / "run", "--max", "recall=1")
    pair(here, "ours", 1)
    pair(here, "theirs", 2)
    check_command("attest", here / "run", "--sign", here / "ours.pem")
    return here


@pytest.fixture()
def here(inputs: Path, tmp_path: Path) -> Path:
    """A copy that a test may change. The model lies where it lay."""
    shutil.copytree(inputs, tmp_path / "inputs")
    return tmp_path / "inputs"


def gate(here: Path, *more: str, key: str = "ours") -> int:
    signed = [
        "--attestation",
        str(here / "run" / "attestation.json"),
        "--key",
        str(here / f"{key}.pub.pem"),
    ]
    return run_command_line(["gate", str(here / "run"), "--max", "recall=1", *signed, *more])


def test_the_statement_names_model_data_plan_result_and_decision(inputs: Path) -> None:
    envelope = json.loads((inputs / "run" / "attestation.json").read_text())
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    said = json.loads(base64.b64decode(envelope["payload"]))
    assert said["_type"] == "https://in-toto.io/Statement/v1"
    held = json.loads((inputs / "run" / "weights.json").read_text())
    predicate, result = said["predicate"], json.loads((inputs / "run" / "result.json").read_text())
    subjects = {one["name"]: one["digest"]["sha256"] for one in said["subject"]}
    assert subjects == result["weights"] and subjects.items() < held.items()
    assert held.keys() - subjects.keys() == {"auxiliary data/pairs"}  # of texts: not told
    assert predicate["data"]["digest"] == result["benchmark"]["digest"] != ""
    assert predicate["tool"]["version"] == result["tool_version"]
    assert predicate["decision"]["verdict"] == "held"
    assert predicate["plan"]["sha256"] == predicate["files"]["plan.json"]
    assert {TABLE, "weights.json"} < set(predicate["files"])
    kept = [path for path in (inputs / "run").iterdir() if path.is_file()]
    private = [path.name for path in kept if "the locker of" in path.read_text(errors="replace")]
    # a digest would confirm a guess of a text
    assert private != [] and not set(private) & set(predicate["files"])
    # digests go first: one in about a thousand statements has the digits by chance
    text = re.sub(r"[0-9a-f]{64}", "", json.dumps(said))
    assert "the locker of" not in text and "7919" not in text


def test_an_attested_run_is_verified_and_one_by_another_key_is_not(
    here: Path, capsys: Said
) -> None:
    assert gate(here) == 0
    assert "attestation: signed by the key" in capsys.readouterr().out
    assert gate(here, key="theirs") == 1
    assert "no signature of it is by the key" in capsys.readouterr().out


def test_another_model_in_the_place_of_the_attested_one_fails(here: Path, capsys: Said) -> None:
    """The attestation still fits the record; the record no longer fits what would be deployed."""
    other = here / "other"
    save_tiny(other)
    assert gate(here, "--model", str(other)) == 0  # the same weights in another place
    (other / "model.safetensors").write_bytes(
        (other / "model.safetensors").read_bytes()[:-4] + b"leak"
    )
    capsys.readouterr()
    assert gate(here, "--model", str(other)) == 1
    assert "model.safetensors" in capsys.readouterr().out


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    held = json.loads(path.read_text())
    change(held)
    path.write_text(json.dumps(held))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("result.json", "result.json has changed since it was signed"),
        (TABLE, "secrets.parquet has changed since it was signed"),
        ("plan.json", "plan.json has changed since it was signed"),
        ("weights.json", "weights.json has changed since it was signed"),
        ("secrets.json", "secrets.json is gone since it was signed"),
        ("more.json", "more.json was added since it was signed"),
    ],
)
def test_a_record_that_was_changed_afterwards_fails(
    here: Path, capsys: Said, name: str, why: str
) -> None:
    path = here / "run" / name
    if name == "secrets.json":
        path.unlink()
    elif name == TABLE:
        repacked(here / "run")
    else:
        # the same JSON, other bytes
        path.write_text(path.read_text() + "\n" if path.exists() else "{}")
    found = attest.judge_attestation(
        here / "run", here / "run" / "attestation.json", here / "ours.pub.pem"
    )
    assert found.verdict == "failed" and why in found.reason
    assert gate(here) in (1, 2)


@pytest.mark.parametrize(
    "how", ["payload", "signature", "type", "statement", "predicate", "subject", "none"]
)
def test_an_attestation_that_was_changed_fails(here: Path, how: str) -> None:
    path = here / "run" / "attestation.json"
    held = json.loads(path.read_text())
    said = json.loads(base64.b64decode(held["payload"]))
    if how == "payload":
        said["predicate"]["decision"]["verdict"] = "failed"
        held["payload"] = base64.b64encode(json.dumps(said).encode()).decode()
    elif how == "signature":
        held["signatures"] = [
            {"keyid": held["signatures"][0]["keyid"], "sig": base64.b64encode(bytes(64)).decode()}
        ]
    elif how == "type":
        held["payloadType"] = "application/json"
    elif how == "none":
        held["signatures"] = []
    else:  # signed by the right key, but about something else
        key = {"statement": "_type", "predicate": "predicateType"}.get(how)
        if key:
            said[key] = "https://example.com/other"
        else:
            said["subject"][0]["digest"]["sha256"] = "0" * 64
        held = json.loads(
            dsse.sign_payload_into_dsse_envelope(json.dumps(said).encode(), here / "ours.pem")
        )
    path.write_text(json.dumps(held))
    assert gate(here) == (2 if how == "type" else 1)


def test_a_key_id_proves_nothing(here: Path) -> None:
    """It is not signed: an envelope by another key may name ours."""
    path = here / "run" / "attestation.json"
    before = json.loads(path.read_text())
    check_command("attest", here / "run", "--sign", here / "theirs.pem")
    edit(path, lambda held: held["signatures"][0].update(keyid=before["signatures"][0]["keyid"]))
    assert gate(here) == 1
    two = {
        **before,
        "signatures": [
            {"keyid": "", "sig": base64.b64encode(bytes(64)).decode()},
            *before["signatures"],
        ],
    }
    path.write_text(json.dumps(two))
    assert gate(here) == 0  # one of several signatures is enough, whatever the ids say


def test_what_is_later_decided_and_rendered_changes_nothing(here: Path) -> None:
    check_command("report", here / "run")
    assert gate(here) == 0 and gate(here) == 0


def test_a_policy_may_require_one(here: Path, capsys: Said) -> None:
    policy = here / "leakage.toml"
    policy.write_text('rules = ["recall <= 1"]\n[require]\nattestation = true\n')
    asked = ["gate", str(here / "run"), "--policy", str(policy)]
    check_command(*asked, code=1)
    assert "the policy requires one" in capsys.readouterr().out
    signed = [
        "--attestation",
        str(here / "run" / "attestation.json"),
        "--key",
        str(here / "ours.pub.pem"),
    ]
    check_command(*asked, *signed)
    policy.write_text('rules = ["recall <= 1"]\n[require]\nattestation = "yes"\n')
    check_command(*asked, code=2)


def test_what_is_no_attestation_or_no_key_is_refused_in_a_sentence(
    here: Path, capsys: Said
) -> None:
    run, path = str(here / "run"), str(here / "run" / "attestation.json")
    check_command("attest", run, "-o", here / "unsigned.json")
    asked = ["gate", run, "--max", "recall=1"]
    pem, pub = str(here / "ours.pem"), str(here / "ours.pub.pem")
    for more, why in (
        (["--attestation", path], "together, got one of them"),
        (["--key", pub], "together, got one of them"),
        (["--attestation", str(here / "unsigned.json"), "--key", pub], "a DSSE envelope in JSON"),
        (["--attestation", path, "--key", pem], "an Ed25519 public key"),
        (["--attestation", str(here / "nowhere"), "--key", pub], "cannot be read"),
        (["--attestation", path, "--key", str(here / "nowhere")], "cannot be read"),
    ):
        check_command(*asked, *more, code=2)
        said = capsys.readouterr().err
        assert why in said and "Traceback" not in said
    check_command("attest", run, "--sign", pub, code=2)
    assert "an Ed25519 private key" in capsys.readouterr().err


def test_a_run_about_no_weights_is_not_attested(here: Path) -> None:
    edit(here / "run" / "result.json", lambda held: held.update(weights={}))
    with pytest.raises(AuditError, match="so the model of its numbers is unknown"):
        attest.build_run_statement(here / "run")


def test_in_totos_library_verifies_our_envelope_by_the_public_key_alone(inputs: Path) -> None:
    envelope = Envelope.from_dict(json.loads((inputs / "run" / "attestation.json").read_text()))
    ours, theirs = (
        SSlibKey.from_crypto(keys.load_pem_public_key((inputs / f"{name}.pub.pem").read_bytes()))
        for name in ("ours", "theirs")
    )
    assert list(envelope.verify([theirs, ours], threshold=1).values()) == [ours]
    with pytest.raises(VerificationError):
        envelope.verify([theirs], threshold=1)


@pytest.mark.parametrize("keyid", [None, "a name of its own"])
def test_an_envelope_that_in_totos_library_signs_is_accepted(here: Path, keyid: str | None) -> None:
    private: Any = keys.load_pem_private_key((here / "ours.pem").read_bytes(), None)
    statement = json.dumps(attest.build_run_statement(here / "run")).encode()
    envelope = Envelope(statement, dsse.IN_TOTO, {})
    envelope.sign(CryptoSigner(private, SSlibKey.from_crypto(private.public_key(), keyid)))
    (here / "run" / "attestation.json").write_text(json.dumps(envelope.to_dict()))
    assert gate(here) == 0 and gate(here, key="theirs") == 1


def test_an_attestation_of_the_former_predicate_type_fails_and_says_what_to_do(
    here: Path, capsys: Said
) -> None:
    statement = attest.build_run_statement(here / "run")
    statement["predicateType"] = "https://pypi.org/project/audit-lm/leakage-audit/v1"
    signed = dsse.sign_payload_into_dsse_envelope(json.dumps(statement).encode(), here / "ours.pem")
    (here / "run" / "attestation.json").write_text(signed)
    assert gate(here) == 1 and "attest the run again" in capsys.readouterr().out
