"""Certificates of a run's own authority: made by `coordinator init`, renewed by `coordinator certificate`.

The authority signs nothing but this run's server certificates, and its digest is the pin in the URL that workers join by:
whoever has the URL needs no public authority. Keys are ECDSA P-256 (TLS stacks everywhere take them), files mode 0600.
`now` is passed in.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protocol.errors import UserError

CA_LIFETIME = dt.timedelta(days=3650)
SERVER_LIFETIME = dt.timedelta(days=397)
_SKEW = dt.timedelta(hours=1)  # clocks of strangers' machines run behind
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
SERVER_FILES = ("server.pem", "server.key")


@dataclass(frozen=True, slots=True)
class Made:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class About:
    """What a person wants to know of a certificate file."""

    names: tuple[str, ...]
    not_before: dt.datetime
    not_after: dt.datetime


def make_authority(name: str, now: dt.datetime) -> Made:
    """A new authority, valid for ten years."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Rollswarm {name}"[:64])])
    builder = _builder(subject, subject, key, now, CA_LIFETIME)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    return _made(builder.sign(key, hashes.SHA256()), key)


def issue(authority: Made, names: Sequence[str], now: dt.datetime) -> Made:
    """A server certificate for `names` (host names and addresses); the authority's is appended, so that chains are whole."""
    ca = x509.load_pem_x509_certificate(authority.certificate)
    ca_key = serialization.load_pem_private_key(authority.key, password=None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    lifetime = min(SERVER_LIFETIME, ca.not_valid_after_utc - now)
    builder = _builder(subject, ca.subject, key, now, lifetime)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
    )
    made = _made(builder.sign(ca_key, hashes.SHA256()), key)
    return Made(made.certificate + authority.certificate, made.key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: dt.datetime,
    lifetime: dt.timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError:
        raise UserError(f"{name!r} is no host name or address that a certificate could be for") from None


def _made(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Made:
    return Made(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def pin_of(ca_pem: bytes) -> str:
    """The pin of an authority: sha256 of its certificate (DER), in hex. Raises ValueError if it is no certificate."""
    return sha256(x509.load_pem_x509_certificate(ca_pem).public_bytes(serialization.Encoding.DER)).hexdigest()


def about(pem: bytes) -> About:
    """What the first certificate in `pem` says. Raises ValueError if it is none."""
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))
    except x509.ExtensionNotFound:
        found = ()
    return About(found, certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def covers(names: Sequence[str], host: str) -> bool:
    """Whether a certificate for `names` is good for `host` (`*.` stands for one label)."""
    host = host.lower().rstrip(".")
    wild = "*." + host.partition(".")[2]
    return any(name.lower() in (host, wild) for name in names)


def write(folder: Path, run: str, names: Sequence[str], now: dt.datetime) -> About:
    """Make or renew the server certificate in `folder`, and the authority if there is none yet.

    Names of loopback are always in. Raises UserError if the folder can't be used.
    """
    ca_path, ca_key_path = folder / "ca.pem", folder / "ca.key"
    every = tuple(dict.fromkeys((*names, *LOOPBACK_NAMES)))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not ca_path.exists() and not ca_key_path.exists():
            authority = make_authority(run, now)
            _replace(ca_key_path, authority.key)
            _replace(ca_path, authority.certificate)
        authority = Made(ca_path.read_bytes(), ca_key_path.read_bytes())
        made = issue(authority, every, now)
        # The key first: whoever loads the pair in between finds that they don't match, and keeps the old one.
        _replace(folder / SERVER_FILES[1], made.key)
        _replace(folder / SERVER_FILES[0], made.certificate)
    except FileNotFoundError as error:
        raise UserError(
            f"the run's authority is incomplete, {error.filename} is missing: restore it from your copy, or delete "
            f"{folder} to make a new one (workers must then join by a new URL)"
        ) from None
    except OSError as error:
        raise UserError(f"cannot write certificates into {folder}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"the run's authority in {folder} can't be used: {error}") from None
    return about(made.certificate)


def _replace(path: Path, content: bytes) -> None:
    """Write mode 0600, whole or not at all."""
    scratch = path.with_name(path.name + ".new")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
