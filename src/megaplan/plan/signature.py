"""Signatures of plans: Ed25519 over a plan's text, in a file next to it, `PLAN.sig`.

The whole text is signed, so the parts that no digest covers (`training`, estimates) are, too. Keys are PEM files as OpenSSL writes them. A
text is verified before it is parsed, and is parsed from the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, Any

from megaplan.diagnostics import diagnostic, refuse
from megaplan.errors import Diagnostic, Location, MegaplanError
from megaplan.spec.read import read_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

FORMAT = "megaplan.signature/1"
ENDING = ".sig"
MAX_BYTES = 1 << 14
"""Size limit of a key or a signature file."""
PRIVATE, PUBLIC = "openssl genpkey -algorithm ed25519 -out key.pem", "openssl pkey -in key.pem -pubout -out public.pem"


def sign(text: str, key: str) -> str:
    """The signature file of a plan's text.

    Args:
        text: Text of the plan, checked.
        key: Path of the private key.

    Raises:
        MegaplanError: MP418, it is not an Ed25519 key without a password; MP419, the package is missing.
    """
    private = _private_key(key)
    made = {"format": FORMAT, "signer": _name(private.public_key()), "signature": base64.b64encode(private.sign(_message(text))).decode()}
    return json.dumps(made, indent=1) + "\n"


def signature_problem(text: str, plan: str, public: str) -> Diagnostic | None:
    """MP417 if a plan has no valid signature of a signer; None if it has.

    Args:
        text: Text of the plan, which is then parsed.
        plan: Path of the plan.
        public: Path of the signer's public key.

    Raises:
        MegaplanError: MP418, the public key cannot be used; MP419, the package is missing.
    """
    signer, file = _public_key(public), plan + ENDING
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415

    try:
        found = json.loads(read_text(file, MAX_BYTES))
        said, signature = found["signer"], base64.b64decode(found["signature"], validate=True)
        if found["format"] != FORMAT or not isinstance(said, str):
            raise ValueError(found["format"])
    except MegaplanError as error:
        return _problem(plan, error.diagnostics[0].detail, public)
    except (ValueError, KeyError, TypeError, RecursionError):
        return _problem(plan, f"{file} is not of format {FORMAT}", public)
    try:
        signer.verify(signature, _message(text))
    except InvalidSignature:
        reason = f"{plan} was changed after it was signed" if said == _name(signer) else f"{file} names another signer, {said}"
        return _problem(plan, reason, public)
    return None


def _problem(plan: str, reason: str, public: str) -> Diagnostic:
    return diagnostic(
        "MP417", f"{reason}\nexpected: the signature of {public}", Location(file=plan), (f"megaplan sign {plan} --key key.pem",)
    )


def _message(text: str) -> bytes:
    """The bytes that are signed: the format's name keeps the signature from counting for another kind of file."""
    return f"{FORMAT} sha256:{hashlib.sha256(text.encode()).hexdigest()}".encode()


def _name(key: Ed25519PublicKey) -> str:
    return f"ed25519:{base64.b64encode(key.public_bytes_raw()).decode()}"


def _private_key(path: str) -> Ed25519PrivateKey:
    _require_package()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

    found: Any = _loaded(path, lambda data: load_pem_private_key(data, password=None), PRIVATE)
    if not isinstance(found, Ed25519PrivateKey):
        raise refuse("MP418", f"{path}: a key of another algorithm; expected Ed25519", PRIVATE, file=path)
    return found


def _public_key(path: str) -> Ed25519PublicKey:
    _require_package()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415

    found: Any = _loaded(path, load_pem_public_key, PUBLIC)
    if not isinstance(found, Ed25519PublicKey):
        raise refuse("MP418", f"{path}: a key of another algorithm; expected Ed25519", PUBLIC, file=path)
    return found


def _loaded(path: str, load: Any, hint: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415

    try:
        return load(read_text(path, MAX_BYTES).encode())
    except MegaplanError as error:
        raise refuse("MP418", error.diagnostics[0].detail, hint, file=path) from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it has a password
        reason = "it has a password" if isinstance(error, TypeError) else "not a key in PEM"
        raise refuse("MP418", f"{path}: {reason}", hint, file=path) from None


def _require_package() -> None:
    try:
        import cryptography  # noqa: F401, PLC0415
    except ImportError:
        raise refuse("MP419", "the package `cryptography` is not installed", "pip install 'megaplan[sign]'") from None
