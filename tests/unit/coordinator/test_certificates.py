from __future__ import annotations

import datetime as dt
import stat
from pathlib import Path

import pytest
from cryptography import x509

from coordinator import certificates
from protocol.errors import UserError

NOW = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)


def test_the_first_certificate_brings_an_authority_and_names_loopback_too(tmp_path: Path) -> None:
    about = certificates.write(tmp_path / "tls", "run", ["run.example", "10.0.0.7"], NOW)
    assert about.names == ("run.example", "localhost", "10.0.0.7", "127.0.0.1", "::1")
    assert about.not_after == NOW + certificates.SERVER_LIFETIME
    assert about.not_before < NOW
    for path in (tmp_path / "tls").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert sorted(path.name for path in (tmp_path / "tls").iterdir()) == [
        "ca.key",
        "ca.pem",
        "server.key",
        "server.pem",
    ]


def test_renewing_keeps_the_authority_and_so_the_pin(tmp_path: Path) -> None:
    certificates.write(tmp_path, "run", ["run.example"], NOW)
    pin, before = certificates.pin_of((tmp_path / "ca.pem").read_bytes()), (tmp_path / "server.pem").read_bytes()
    later = NOW + dt.timedelta(days=300)
    assert certificates.write(tmp_path, "run", ["run.example"], later).not_after > later + dt.timedelta(days=390)
    assert certificates.pin_of((tmp_path / "ca.pem").read_bytes()) == pin
    assert (tmp_path / "server.pem").read_bytes() != before


def test_a_certificate_never_outlives_its_authority(tmp_path: Path) -> None:
    certificates.write(tmp_path, "run", ["run.example"], NOW)
    late = NOW + certificates.CA_LIFETIME - dt.timedelta(days=10)
    assert certificates.write(tmp_path, "run", ["run.example"], late).not_after == NOW + certificates.CA_LIFETIME


def test_an_authority_without_its_key_is_not_replaced_behind_the_workers_backs(tmp_path: Path) -> None:
    certificates.write(tmp_path, "run", ["run.example"], NOW)
    (tmp_path / "ca.key").unlink()
    before = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(UserError, match=r"ca\.key is missing"):
        certificates.write(tmp_path, "run", ["run.example"], NOW)
    assert (tmp_path / "ca.pem").read_bytes() == before


def test_the_authority_signs_servers_and_nothing_else() -> None:
    authority = certificates.make_authority("run", NOW)
    made = certificates.issue(authority, ["run.example"], NOW)
    leaf, ca = x509.load_pem_x509_certificates(made.certificate)
    leaf.verify_directly_issued_by(ca)
    assert leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0


def test_what_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no host name"):
        certificates.write(tmp_path, "run", ["läuft.example"], NOW)


@pytest.mark.parametrize(
    ("host", "fits"),
    [
        ("run.example", True),
        ("RUN.example.", True),
        ("a.b.example", True),
        ("b.example", False),
        ("x.a.b.example", False),
    ],
)
def test_whom_a_certificate_covers(host: str, fits: bool) -> None:
    assert certificates.covers(["run.example", "*.b.example"], host) is fits
