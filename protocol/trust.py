"""What makes a caller believe that it speaks with the coordinator it means; aiohttp is imported only when it asks.

    https://host:7448#sha256=…   the run's own authority, by the digest of its certificate; nothing else is needed
    https://host:7448            a public authority, or the one in a file (`--ca`)
    http://host:7448             plaintext: for loopback, or asked for by typing it

With a pin the authority's certificate is fetched over an unverified connection from `CA_PATH`: the digest alone decides whether
it is believed, and everything after that is verified against it, names included.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import ssl
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

from protocol.errors import UserError

CA_PATH = "/.well-known/rollswarm-ca.pem"
_PIN = re.compile(r"sha256=([0-9a-f]{64})")
_CA_BYTES_MAX = 1 << 16
_TIMEOUT_S = 15.0
_PROBE_S = 5.0
_NO_HTTP = "does not speak HTTP: check the port"
# OpenSSL's X509_V_ERR_… codes.
_EXPIRED, _NOT_YET, _HOSTNAME, _ADDRESS = 10, 9, 62, 64


class Trust:
    """How to believe one coordinator. `url`: its base URL without the pin. Raises UserError for a URL that is none."""

    def __init__(self, url: str, ca: Path | None = None) -> None:
        base, _, fragment = url.strip().partition("#")
        try:
            parts = urlsplit(base)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.scheme not in ("http", "https"):
            raise UserError(f"a coordinator has an https:// or http:// URL, got {url!r:.200}")
        self.url = base.rstrip("/")
        self.host, self.port = host, port or (443 if parts.scheme == "https" else 80)
        self.encrypted = parts.scheme == "https"
        self._pin = self._parse_pin(fragment)
        self.ca_pem = None if ca is None else _read_ca(ca)
        if not self.encrypted and (self._pin or ca):
            raise UserError(f"{self.url} is not encrypted, so a pin or --ca says nothing: use https://")

    @staticmethod
    def _parse_pin(fragment: str) -> str:
        if not fragment:
            return ""
        found = _PIN.fullmatch(fragment.lower())
        if found is None:
            raise UserError(
                f"#{fragment:.80} is no pin: it must be #sha256= and 64 hex digits, as the operator gave it"
            )
        return found[1]

    async def context(self) -> ssl.SSLContext | None:
        """For TLS connections to this coordinator; None for plaintext.

        Raises UserError if the authority that it shows is not the pinned one; aiohttp's errors if it can't be asked.
        """
        if not self.encrypted:
            return None
        if self._pin and self.ca_pem is None:
            self.ca_pem = await self._fetch_authority()
        return client_context(self.ca_pem)

    async def _fetch_authority(self) -> bytes:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(self.url + CA_PATH, ssl=_unverified(), allow_redirects=False) as response,
        ):
            if response.status == 404:
                raise UserError(
                    f"{self.url} has no authority of its own, so there is nothing to pin: leave #sha256=… off, or ask "
                    "its operator for the right URL"
                )
            if response.status != 200:
                raise aiohttp.ClientError(f"{self.url}{CA_PATH} answered {response.status}")
            pem = await response.content.read(_CA_BYTES_MAX)
        try:
            shown = sha256(ssl.PEM_cert_to_DER_cert(pem.decode("ascii").strip())).hexdigest()
        except ValueError:
            shown = "nothing"
        if shown != self._pin:
            raise UserError(
                f"{self.url} shows another authority than the one pinned in the URL (sha256 {shown} instead of "
                f"{self._pin}): someone may stand between. If the operator made a new one, ask for the new URL"
            )
        return pem

    async def explain(self, error: BaseException) -> UserError | None:
        """What the person who typed the URL can mend about a failed request; None if trying again may help."""
        import aiohttp

        found = _tls_error(error)
        if found is not None:
            return UserError(explain_tls(found, self.url))
        reset = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | aiohttp.ClientResponseError)
        refused = isinstance(error, aiohttp.ClientConnectorError)
        if not self.encrypted and reset and not refused and await speaks_tls(self.host, self.port):
            return UserError(
                f"{self.url} speaks TLS: use https:// (the operator's URL with #sha256=… if it has an authority of its own)"
            )
        if _no_http(error):
            return UserError(f"{self.url} {_NO_HTTP}")
        return None


def why_unreachable(error: BaseException) -> str:
    """What a person can read of a failed request: the system's words, without Python's objects."""
    import aiohttp

    if isinstance(error, TimeoutError):
        return "no answer in time"
    if _no_http(error):
        return f"what answers there {_NO_HTTP}"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    said = (getattr(cause, "strerror", None) or str(cause) or type(error).__name__).strip()
    if isinstance(cause, OSError) and cause.errno and said.startswith("Connect call failed"):  # asyncio's, with a tuple
        return os.strerror(cause.errno)
    return said


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


async def examine(host: str, port: int, context: ssl.SSLContext) -> str:
    """What is wrong with the certificate that host:port shows; "" if nothing is, or nobody answers."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port, ssl=context), _PROBE_S)
        writer.close()
    except ssl.SSLError as error:
        return explain_tls(error, f"{host}:{port}")
    except (OSError, TimeoutError):
        return ""
    return ""


async def speaks_tls(host: str, port: int) -> bool:
    """Whether host:port answers a TLS handshake, whoever it is."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port, ssl=_unverified()), _PROBE_S)
    except (OSError, TimeoutError):  # ssl.SSLError is one
        return False
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), _PROBE_S)
    return True


def client_context(ca_pem: bytes | None, alpn: tuple[str, ...] = ()) -> ssl.SSLContext:
    """Verifies names and chains, against this authority alone or (None) the machine's own list."""
    context = ssl.create_default_context(cadata=None if ca_pem is None else ca_pem.decode("ascii"))
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


def explain_tls(error: ssl.SSLError, where: str) -> str:
    """A failed handshake in words: what happened, whose fault, what to do."""
    code = getattr(error, "verify_code", None)
    if code == _EXPIRED:
        return (
            f"the certificate of {where} has expired, by this machine's clock: set the clock if it is wrong, else tell the "
            "operator to run `coordinator certificate`"
        )
    if code == _NOT_YET:
        return f"the certificate of {where} is not valid yet, by this machine's clock: set the clock"
    if code in (_HOSTNAME, _ADDRESS):
        return (
            f"the certificate of {where} is for another host: use the address that the operator gave, or tell the operator "
            "to add this one (`coordinator certificate --name HOST`)"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"nobody that this machine trusts vouches for the certificate of {where} ({error.verify_message}): use the "
            "operator's URL with #sha256=…, or pass the authority's file by --ca. If you did, someone may stand between"
        )
    if "WRONG_VERSION_NUMBER" in str(error) or "RECORD_LAYER_FAILURE" in str(error):
        return f"{where} does not speak TLS: check the port; http:// works only if its operator chose plaintext"
    return f"the TLS handshake with {where} failed ({error.reason or error})"


def _no_http(error: BaseException) -> bool:
    """Whether what answered was no HTTP, as on a port for gRPC."""
    import aiohttp
    from aiohttp.http import HttpProcessingError

    return isinstance(error, aiohttp.ClientResponseError) and isinstance(error.__cause__, HttpProcessingError)


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        inner: BaseException = error.certificate_error
    elif isinstance(error, aiohttp.ClientConnectorError):
        inner = error.os_error
    else:
        inner = error
    return inner if isinstance(inner, ssl.SSLError) else None


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _read_ca(path: Path) -> bytes:
    try:
        pem = path.read_bytes()
        ssl.create_default_context(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError):  # the first is an OSError
        raise UserError(f"--ca: {path} holds no certificate in PEM") from None
    except OSError as error:
        raise UserError(f"--ca: cannot read {path}: {error.strerror}") from None
    return pem
