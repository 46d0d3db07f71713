"""Asks a coordinator's API to do something, by token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from protocol.errors import OurFault, UserError
from protocol.trust import Trust, is_loopback, why_unreachable

_TIMEOUT = aiohttp.ClientTimeout(total=30)


def read_token(path: Path) -> str:
    """Raises UserError if there is none."""
    try:
        return path.read_text().strip()
    except OSError as error:
        raise UserError(f"cannot read the token file {path}: {error.strerror}") from None


async def act(url: str, token: str, ca: Path | None, action: str, arguments: Mapping[str, str]) -> str:
    """What was done. Raises UserError if the token, the role or an argument won't do, or nobody answers there."""
    trust = Trust(url, ca)
    if not trust.encrypted and not is_loopback(trust.host):
        raise UserError(f"your token would travel readable to {trust.url}: use https://")
    headers = {"Authorization": f"Bearer {token}"}
    target = f"{trust.url}/api/v1/admin/{action}"
    try:
        context = await trust.context()
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, headers=headers) as session,
            session.post(target, json=dict(arguments), ssl=context or True, allow_redirects=False) as response,
        ):
            body = await response.text(errors="replace")
            if response.status == 200:
                return str(json.loads(body)["done"])
            if response.status >= 500:
                raise OurFault(f"the coordinator failed: {body:.300}")
            raise UserError(f"refused ({response.status}): {_why(body):.500}")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        mendable = await trust.explain(error)
        raise (mendable or UserError(f"cannot reach {trust.url}: {why_unreachable(error)}")) from None


def _why(body: str) -> str:
    """What the API says is wrong; all of the answer if something else gave it, as a proxy in front."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.strip()
