"""The server's side of TLS: which listeners are encrypted, and the certificate files, read again when they change.

Plaintext is for loopback. Anywhere else `coordinator serve` refuses to start without a certificate, unless the run file says
`insecure = true` (a proxy in front ends TLS, or the network is private): what travels then is readable by whoever is between.
"""

from __future__ import annotations

import datetime as dt
import logging
import ssl
import threading
from pathlib import Path
from typing import Any

import grpc

from coordinator import certificates
from protocol.errors import UserError
from protocol.trust import is_loopback

log = logging.getLogger(__name__)

_WARN_BEFORE = dt.timedelta(days=30)
_RENEW = "`coordinator certificate --config RUN.toml` makes one"


def check_plaintext(host: str, field: str, *, insecure: bool) -> None:
    """Raises UserError if a plaintext listener on `host` was not asked for by name."""
    if insecure or is_loopback(host):
        return
    raise UserError(
        f"server.{field} is {host}, which others reach, and [server] names no certificate: {_RENEW}; or set insecure = "
        "true, if a proxy in front ends TLS or you mean everybody on the way to read and change what is sent"
    )


class ServerTls:
    """A certificate and its key, as both listeners use them. `ca_pem`: the authority that workers pin, if it is our own."""

    def __init__(self, certificate: Path, key: Path, ca: Path | None, now: dt.datetime) -> None:
        self._certificate, self._key = certificate, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._lock = threading.Lock()  # gRPC asks from a thread of its own
        self._stamp = self._stat()
        self._about, self._chain = self._load(now)
        self.ca_pem = None if ca is None else _read(ca, "server.ca")
        self._pending: tuple[bytes, bytes] | None = None
        self.pin = "" if self.ca_pem is None else _pin(self.ca_pem, ca)

    @property
    def not_after(self) -> dt.datetime:
        return self._about.not_after

    def check_covers(self, host: str) -> None:
        """Raises UserError if workers that are told `host` would find a certificate for something else."""
        if not certificates.covers(self._about.names, host):
            raise UserError(
                f"{self._certificate} is for {', '.join(self._about.names) or 'no name'}, not for server.advertise_host "
                f"{host}: every worker would refuse it; `coordinator certificate --name {host}` makes one that fits"
            )

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials that follow the files: a renewed certificate is used from the next handshake on."""

        def renewed() -> Any:  # None says: no change
            with self._lock:
                pending, self._pending = self._pending, None
            return None if pending is None else _configuration(*pending)

        return grpc.dynamic_ssl_server_credentials(_configuration(*self._chain), renewed)

    def refresh(self, now: dt.datetime) -> bool:
        """Read the files again if they changed; whether they did. What can't be used is logged and the old one stays."""
        try:
            stamp = self._stat()
            if stamp == self._stamp:
                return False
            about, chain = self._load(now)
        except UserError as error:
            log.error("the new certificate is not used: %s", error, extra={"action": "certificate"})
            return False
        with self._lock:
            self._pending = chain
        self._stamp, self._about, self._chain = stamp, about, chain
        log.info("serving a new certificate, valid until %s", about.not_after, extra={"action": "certificate"})
        return True

    def warning(self, now: dt.datetime) -> str:
        """What to tell the operator about its expiry, "" while that is far."""
        left = self._about.not_after - now
        if left > _WARN_BEFORE:
            return ""
        return (
            f"the certificate {self._certificate} {'expired' if left < dt.timedelta() else 'expires'} on "
            f"{self._about.not_after:%Y-%m-%d %H:%M} UTC: renew it with `coordinator certificate`, no restart is needed"
        )

    def _stat(self) -> tuple[int, int]:
        try:
            return self._certificate.stat().st_mtime_ns, self._key.stat().st_mtime_ns
        except OSError as error:
            raise UserError(f"cannot read {error.filename} ([server]): {error.strerror}; {_RENEW}") from None

    def _load(self, now: dt.datetime) -> tuple[certificates.About, tuple[bytes, bytes]]:
        """Check the pair on a scratch context first: one that does not fit must not spoil the one in use."""
        chain = _read(self._certificate, "server.certificate"), _read(self._key, "server.certificate_key")
        try:
            about = certificates.about(chain[0])
        except ValueError as error:
            raise self._unfit(error) from None
        self._load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        if about.not_after <= now:
            raise UserError(
                f"the certificate {self._certificate} expired on {about.not_after:%Y-%m-%d}: "
                "`coordinator certificate --config RUN.toml` renews it"
            )
        self._load_into(self.context)
        return about, chain

    def _load_into(self, context: ssl.SSLContext) -> None:
        """Raises UserError also if the files were changed, or have gone, since they were read."""
        try:
            context.load_cert_chain(self._certificate, self._key)
        except (ValueError, OSError) as error:  # ssl.SSLError is one
            raise self._unfit(error) from None

    def _unfit(self, error: Exception) -> UserError:
        return UserError(f"{self._certificate} and {self._key} are no certificate and its key: {error}; {_RENEW}")


def _configuration(certificate: bytes, key: bytes) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(key, certificate)])


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{field}: cannot read {path}: {error.strerror}; {_RENEW}") from None


def _pin(ca_pem: bytes, path: Path | None) -> str:
    try:
        return certificates.pin_of(ca_pem)
    except ValueError as error:
        raise UserError(f"server.ca: {path} is no certificate: {error}") from None
