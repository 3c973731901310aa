"""Sign and verify DSSE envelopes (https://github.com/secure-systems-lab/dsse, v1).

securesystemslib signs with Ed25519 keys in PEM. A key id is the SHA-256 of the public key's
canonical JSON. The payload is parsed only after its signature is verified.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from auditor.core.errors import AuditError

IN_TOTO = "application/vnd.in-toto+json"


class NoValidSignature(AuditError):
    """Error for an envelope that the key did not validly sign."""


def sign_payload_into_dsse_envelope(payload: bytes, key: Path) -> str:
    """Return the payload in a signed envelope, as JSON.

    Args:
        payload: bytes of type `IN_TOTO`.
        key: file of an Ed25519 private key, PEM without a password.

    Raises:
        AuditError: if the key is invalid or securesystemslib is not installed.
    """
    private = _load_ed25519_key(key, "private")
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import CryptoSigner

    envelope = Envelope(payload, IN_TOTO, {})
    envelope.sign(CryptoSigner(private))
    return json.dumps(envelope.to_dict())


def verify_dsse_envelope(envelope: str, key: Path) -> tuple[bytes, str]:
    """Return the payload, then the hex id of the key that signed the envelope.

    The envelope's own key id is ignored, because it is not signed and other tools compute other
    ids.

    Args:
        envelope: the envelope as JSON.
        key: file of an Ed25519 public key, PEM.

    Raises:
        AuditError: if the envelope's type or the key is invalid.
        NoValidSignature: if this key did not sign the envelope.
    """
    public = _load_ed25519_key(key, "public")
    signed = _parse_dsse_envelope(envelope)
    from securesystemslib.exceptions import UnverifiedSignatureError
    from securesystemslib.signer import SSlibKey

    for signature in signed.signatures.values():
        try:
            SSlibKey.from_crypto(public, signature.keyid).verify_signature(signature, signed.pae())
        except UnverifiedSignatureError:
            continue
        return signed.payload, SSlibKey.from_crypto(public).keyid
    raise NoValidSignature(f"no signature of it is by the key {str(key)!r}")


def _parse_dsse_envelope(text: str) -> Any:
    from securesystemslib.dsse import Envelope

    try:
        envelope = Envelope.from_dict(json.loads(text))
    # Any damage: bad JSON, a missing field, bad base64, a repeated key id.
    except Exception as error:
        raise AuditError(
            "expected a signed attestation, a DSSE envelope in JSON, got something else "
            f"({type(error).__name__})"
        ) from None
    if envelope.payload_type != IN_TOTO:
        raise AuditError(f"expected an envelope of {IN_TOTO}, got {str(envelope.payload_type)!r}")
    return envelope


def _load_ed25519_key(path: Path, key_kind: str) -> Any:
    try:
        import securesystemslib  # noqa: F401
        from cryptography.hazmat.primitives import serialization as keys
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise AuditError(
            "signatures need securesystemslib: pip install 'audit-lm[attest]'"
        ) from None
    kind = ed25519.Ed25519PrivateKey if key_kind == "private" else ed25519.Ed25519PublicKey
    expected = f"expected an Ed25519 {key_kind} key in PEM, without a password"
    try:
        data = path.read_bytes()
        if key_kind == "private":
            key: Any = keys.load_pem_private_key(data, None)
        else:
            key = keys.load_pem_public_key(data)
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # any damage; a message may quote the key
        raise AuditError(f"{expected}, got {str(path)!r} ({type(error).__name__})") from None
    if not isinstance(key, kind):
        raise AuditError(f"{expected}, got {str(path)!r}, another kind of key")
    return key
