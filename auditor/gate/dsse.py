"""Signed envelopes as DSSE has them (https://github.com/secure-systems-lab/dsse, v1), with Ed25519 keys in PEM files.

What is signed is the payload with its type, byte by byte (PAE): nothing is parsed before its signature is verified.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from pathlib import Path
from typing import Any

from auditor.core.errors import AuditError

IN_TOTO = "application/vnd.in-toto+json"


def pre_authentication_encoding(kind: str, payload: bytes) -> bytes:
    """Pre-authentication encoding: what is signed of a payload of this type."""
    # lengths of bytes, in decimal: no other type and payload make the same bytes
    name = kind.encode()
    return b"DSSEv1 %d %b %d %b" % (len(name), name, len(payload), payload)


def sign_payload_into_dsse_envelope(payload: bytes, key: Path) -> str:
    """The envelope, as JSON. key: an Ed25519 private key, PEM without a password. Raises AuditError for another."""
    private = _load_ed25519_key(key, "private")
    signed = base64.b64encode(private.sign(pre_authentication_encoding(IN_TOTO, payload))).decode()
    signature = {"keyid": _dsse_public_key_digest(private.public_key()), "sig": signed}
    body = base64.b64encode(payload).decode()
    return json.dumps({"payload": body, "payloadType": IN_TOTO, "signatures": [signature]})


def verified_dsse_payload_and_key_digest(envelope: str, key: Path) -> tuple[bytes, str]:
    """The payload and the SHA-256 of the key that signed it, hex. key: an Ed25519 public key, PEM.

    A key id in the envelope is a hint that nobody signed: it is not looked at. Raises AuditError for what is no
    envelope of this type, and `NoValidSignature` where the key signed nothing of it.
    """
    public, held = _load_ed25519_key(key, "public"), _parse_dsse_envelope(envelope)
    from cryptography.exceptions import InvalidSignature

    payload = _decoded_base64_of_dsse_envelope(held["payload"])
    for one in held["signatures"]:
        try:
            public.verify(_decoded_base64_of_dsse_envelope(one["sig"]), pre_authentication_encoding(IN_TOTO, payload))
        except InvalidSignature:
            continue
        return payload, _dsse_public_key_digest(public)
    raise NoValidSignature(f"no signature of it is by the key {str(key)!r}")


class NoValidSignature(AuditError):
    """The envelope holds no valid signature by the key."""


def _parse_dsse_envelope(text: str) -> dict[str, Any]:
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        held = None
    if not isinstance(held, dict) or not isinstance(held.get("payload"), str):
        raise AuditError("expected a signed attestation, a DSSE envelope in JSON, got something else")
    if held.get("payloadType") != IN_TOTO:
        raise AuditError(f"expected an envelope of {IN_TOTO}, got {str(held.get('payloadType'))!r}")
    signed = held.get("signatures")
    if not isinstance(signed, list) or not all(isinstance(s, dict) and isinstance(s.get("sig"), str) for s in signed):
        raise AuditError("expected an envelope with signatures, got none that can be read")
    return held


def _load_ed25519_key(path: Path, which: str) -> Any:
    try:
        from cryptography.hazmat.primitives import serialization as keys
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise AuditError("signatures need cryptography: pip install 'audit-lm[attest]'") from None
    kind = ed25519.Ed25519PrivateKey if which == "private" else ed25519.Ed25519PublicKey
    expected = f"expected an Ed25519 {which} key in PEM, without a password"
    try:
        data = path.read_bytes()
        key: Any = keys.load_pem_private_key(data, None) if which == "private" else keys.load_pem_public_key(data)
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # whatever is wrong with it; a message may quote it
        raise AuditError(f"{expected}, got {str(path)!r} ({type(error).__name__})") from None
    if not isinstance(key, kind):
        raise AuditError(f"{expected}, got {str(path)!r}, another kind of key")
    return key


def _dsse_public_key_digest(public: Any) -> str:
    from cryptography.hazmat.primitives import serialization as keys

    encoding, form = keys.Encoding.DER, keys.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(public.public_bytes(encoding, form)).hexdigest()


def _decoded_base64_of_dsse_envelope(text: str) -> bytes:
    """Standard or URL-safe base64, as the protocol allows."""
    try:
        # validate: by default foreign characters are skipped, so that many texts would be one payload
        return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        raise AuditError("expected base64 in the envelope, got something else") from None
