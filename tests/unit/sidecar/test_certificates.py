"""Certificates: what is made, what is refused, what a bad reload does."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sidecar import certificates as tls


def put(directory: Path, pair: tls.KeyPair) -> None:
    for name, data in ((tls.CERTIFICATE_FILE, pair.certificate), (tls.KEY_FILE, pair.key)):
        fresh = directory / f".{name}"
        fresh.write_bytes(data)
        os.replace(fresh, directory / name)  # a new inode, as a Kubernetes mount swaps


def test_self_signed_is_ours_and_valid_now() -> None:
    certificate = x509.load_pem_x509_certificate(tls.self_signed().certificate)
    assert certificate.subject.rfc4514_string() == "O=kvpull"
    now = dt.datetime.now(dt.UTC)
    assert certificate.not_valid_before_utc < now < certificate.not_valid_after_utc


def test_a_private_key_has_no_repr() -> None:
    pair = tls.self_signed()
    assert "PRIVATE" not in repr(pair)


def test_load_names_the_file_at_fault(tmp_path: Path) -> None:
    with pytest.raises(tls.CertificateError, match=r"tls\.crt: No such file"):
        tls.load(tmp_path)
    pair, other = tls.self_signed(), tls.self_signed()
    put(tmp_path, tls.KeyPair(pair.certificate, other.key))
    with pytest.raises(tls.CertificateError, match=r"tls\.key: does not belong"):
        tls.load(tmp_path)
    put(tmp_path, tls.KeyPair(b"nonsense", pair.key))
    with pytest.raises(tls.CertificateError, match=r"tls\.crt: no PEM certificate"):
        tls.load(tmp_path)
    put(tmp_path, tls.KeyPair(pair.certificate, b"nonsense"))
    with pytest.raises(tls.CertificateError, match=r"tls\.key: no PEM private key"):
        tls.load(tmp_path)


def test_a_changed_pair_is_seen_and_a_bad_one_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tls.self_signed(), tls.self_signed()
    put(tmp_path, first)
    mounted = tls.MountedCertificate(tmp_path)
    assert mounted.changed() is None
    put(tmp_path, tls.KeyPair(second.certificate, first.key))
    assert mounted.changed() is None
    assert mounted.changed() is None  # reported once, not at every connection
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert mounted.pair == first
    put(tmp_path, second)
    assert mounted.changed() == second
    assert mounted.changed() is None


def test_an_authority_is_checked_and_the_last_good_one_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "ca.crt"
    for content, fault in ((None, "No such file"), (b"nonsense", "no PEM certificate")):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(tls.CertificateError, match=rf"ca\.crt: {fault}"):
            tls.load_authority(file)
    first, second = tls.self_signed().certificate, tls.self_signed().certificate
    file.write_bytes("# Grüße\n".encode() + first)
    mounted = tls.MountedAuthority(file)
    assert mounted.current.encode().endswith(first)
    file.write_bytes(b"nonsense")
    assert (mounted.changed(), mounted.changed()) == (None, None)  # reported once
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    file.write_bytes(second)
    assert mounted.changed() == second.decode()


def test_a_leaf_is_no_authority(tmp_path: Path) -> None:
    """Nobody would be served, and nothing would say why."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([]), dt.datetime.now(dt.UTC)
    leaf = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + dt.timedelta(days=1))
    pem = leaf.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (tmp_path / "leaf.crt").write_bytes(pem)
    with pytest.raises(tls.CertificateError, match=r"leaf\.crt: holds no certificate of an authority"):
        tls.load_authority(tmp_path / "leaf.crt")
