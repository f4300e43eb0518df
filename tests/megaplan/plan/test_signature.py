"""Plans are signed with Ed25519, and every change of a signed plan is found."""

import json
import shutil
import sys

import pytest

import megaplan
from megaplan.cli.main import run


@pytest.fixture
def plan(tmp_path, monkeypatch):
    shutil.copy("plans/tiny-hybrid.json", tmp_path / "tiny.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tiny.json"


@pytest.fixture
def keys(plan):
    """Two pairs of keys, and a key of another algorithm."""
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519  # noqa: PLC0415

    pem, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    made = (ed25519.Ed25519PrivateKey.generate(), ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1()))
    for name, key in zip(("mine", "other", "curve"), made, strict=True):
        (plan.parent / f"{name}.key").write_bytes(key.private_bytes(pem, private, serialization.NoEncryption()))
        (plan.parent / f"{name}.pub").write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    locked = made[0].private_bytes(pem, private, serialization.BestAvailableEncryption(b"word"))
    (plan.parent / "locked.key").write_bytes(locked)


def problem(plan, public="mine.pub"):
    """Detail of MP417, the only finding; None if the signature holds."""
    found = megaplan.check(plan, signer=public).findings
    assert [each.code for each in found if each.code == "MP417"] == ["MP417"] * bool(found)
    return next((each.detail for each in found if each.code == "MP417"), None)


def test_a_signed_plan_passes_and_an_unsigned_one_does_not(plan, keys, capsys):
    assert "does not exist" in problem(plan)
    assert run(["sign", "tiny.json", "--key", "mine.key"]) == 0
    assert "sha256:" in capsys.readouterr().out
    assert problem(plan) is None
    assert run(["check", "tiny.json", "--signer", "mine.pub"]) == 0
    assert run(["check", "tiny.json", "--signer", "other.pub"]) == 1
    assert "another signer" in problem(plan, "other.pub")


@pytest.mark.parametrize("key", ["inputs", "estimates", "space", "training"])
def test_every_change_is_found(plan, keys, capsys, key):
    """A learning rate is in no digest, white space in no value; the signature covers the text."""
    assert run(["sign", "tiny.json", "--key", "mine.key"]) == 0
    text = plan.read_text()
    raw = json.loads(text)
    if key == "training":
        raw["inputs"]["training"]["steps"] += 1
    elif key == "inputs":
        raw["inputs"]["batch"]["micro_batch_size"] += 1
    elif key == "estimates":
        raw["estimates"]["fits"] = not raw["estimates"]["fits"]
    plan.write_text(text + "\n" if key == "space" else json.dumps(raw))
    assert run(["check", "tiny.json", "--signer", "mine.pub"]) > 0
    assert "MP417" in capsys.readouterr().err


def test_a_forged_signature_is_found(plan, keys):
    assert run(["sign", "tiny.json", "--key", "other.key"]) == 0
    other = json.loads((plan.parent / "tiny.json.sig").read_text())
    assert run(["sign", "tiny.json", "--key", "mine.key"]) == 0  # replaces a signature
    file = plan.parent / "tiny.json.sig"
    mine = json.loads(file.read_text())
    file.write_text(json.dumps({**mine, "signature": other["signature"]}))
    assert "was changed" in problem(plan)
    for text in ("[]", "{}", '{"format": 1', json.dumps({**mine, "signature": "?"}), json.dumps({**mine, "format": "megaplan.plan/1"})):
        file.write_text(text)
        assert problem(plan) is not None


def test_what_cannot_sign_is_refused(plan, keys, capsys):
    for key in ("curve.key", "locked.key", "mine.pub", "tiny.json", "absent"):
        assert run(["sign", "tiny.json", "--key", key]) == 2
        assert "MP418" in capsys.readouterr().err, key
    for key in ("curve.pub", "mine.key", "absent"):
        assert run(["check", "tiny.json", "--signer", key]) == 2
        assert "MP418" in capsys.readouterr().err, key
    (plan.parent / "tiny.json.sig").write_text("notes")
    assert run(["sign", "tiny.json", "--key", "mine.key"]) == 2
    assert "MP482" in capsys.readouterr().err
    assert run(["sign", "-", "--key", "mine.key"]) == 2
    plan.write_text(plan.read_text().replace('"micro_batch_size": 4', '"micro_batch_size": 5', 1))
    (plan.parent / "tiny.json.sig").unlink()
    assert run(["sign", "tiny.json", "--key", "mine.key"]) == 2
    assert not (plan.parent / "tiny.json.sig").exists()
    with pytest.raises(TypeError, match="file"):
        megaplan.check(json.loads(plan.read_text()), signer="mine.pub")


def test_without_the_package_its_name_is_said(plan, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert run(["sign", "tiny.json", "--key", "mine.key"]) == 2
    assert run(["check", "tiny.json", "--signer", "mine.pub"]) == 2
    assert capsys.readouterr().err.count("error[MP419]") == 2
    assert run(["check", "tiny.json"]) == 0
