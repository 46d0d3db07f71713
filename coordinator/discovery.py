"""Discovery: the run's terms from a coordinator's URL."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

import aiohttp

from coordinator.channel import Backoff, parse_endpoint
from protocol.errors import UserError
from protocol.terms import WELL_KNOWN_PATH, RunTerms, parse_terms
from protocol.trust import Trust, is_loopback, why_unreachable

log = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=15)
_NAMELESS_S = 30.0  # a network that is only just up may not know a name yet
_NO_COORDINATOR = (301, 302, 307, 308, 400, 401, 403, 404, 405)


async def fetch_terms(
    coordinator: Trust | str, *, patience_s: float | None = None, on_retry: Callable[[str], None] = log.warning
) -> RunTerms:
    """The run's terms from a coordinator; tried again while it is down.

    `patience_s`: give up after so long (None: never). Raises UserError for a URL that serves no terms, a host that does not
    exist, a certificate that can't be believed, or gRPC endpoints that are less guarded than the URL.
    """
    trust = Trust(coordinator) if isinstance(coordinator, str) else coordinator
    backoff, begun = Backoff(), time.monotonic()
    nameless_since: float | None = None
    while True:
        try:
            terms = await _ask(trust)
            if not isinstance(terms, str):
                return terms
            problem = terms
        except aiohttp.InvalidURL:
            raise UserError(f"--coordinator is no URL: {trust.url!r}") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            mendable = await trust.explain(error)
            if mendable is not None:
                raise mendable from None
            problem = f"cannot reach {trust.url} ({why_unreachable(error)})"
            now = time.monotonic()
            nameless_since = (nameless_since or now) if _no_such_host(error) else None
            if nameless_since is not None and now - nameless_since >= min(_NAMELESS_S, patience_s or _NAMELESS_S):
                raise UserError(
                    f"there is no host {trust.host!r}: check the spelling of --coordinator, and that this machine is online"
                ) from None
        if patience_s is not None and time.monotonic() - begun >= patience_s:
            raise UserError(f"{problem}: check the URL, and that the coordinator runs")
        seconds = await backoff.pause()
        on_retry(f"{problem}; trying again (waited {seconds:.1f} s): is the URL right, and does the coordinator run?")


def _no_such_host(error: BaseException) -> bool:
    """Whether the name service answered that there is no such name; that it did not answer may pass."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME


async def _ask(trust: Trust) -> RunTerms | str:
    """The terms, or why there are none for now."""
    context = await trust.context()
    target = trust.url + WELL_KNOWN_PATH
    async with (
        aiohttp.ClientSession(timeout=_TIMEOUT) as session,
        session.get(target, allow_redirects=False, ssl=context or True) as response,
    ):
        if response.status != 200:
            problem = f"{target} answered {response.status}"
            if response.status in _NO_COORDINATOR:
                raise UserError(f"{problem}: is {trust.url} a coordinator's URL?")
            return problem
        terms = parse_terms(await response.content.read(1 << 21), trust.url)
    for each in map(parse_endpoint, terms.grpc_endpoints):
        if trust.encrypted and not each.encrypted and not is_loopback(each.host):
            raise UserError(
                f"{trust.url} is encrypted, but tells workers to use {each.address} without: tell its operator to name a "
                "certificate in [server]"
            )
    return terms
