"""What a server has of a version that may still be on its way to it, as `GET /v1/have/{total digest}` tells.

A list of indexes in the order in which they were verified, of which each answer carries the part that the asker
doesn't know (`after`). `epoch` names the list: after a restart it is another one, and the asker begins anew.
`coming` are the shards that the server fetches right now, so that its siblings leave those to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MAX_ADDED = 4096
MAX_COMING = 256
MAX_BYTES = 64 * 1024
ROLES = ("origin", "relay")
_MAX_NAME = 64


@dataclass(frozen=True, slots=True)
class Have:
    """One answer. `added` are the indexes from position `after` on; with `complete` the server has all of them."""

    role: str
    server_id: str
    complete: bool
    epoch: str = ""
    after: int = 0
    added: tuple[int, ...] = ()
    coming: tuple[int, ...] = ()

    @property
    def next(self) -> int:
        """What to ask for next, as `after`."""
        return self.after + len(self.added)

    def to_json(self) -> dict[str, Any]:
        """As HTTP carries it."""
        return {
            "role": self.role,
            "id": self.server_id,
            "complete": self.complete,
            "epoch": self.epoch,
            "after": self.after,
            "added": self.added,
            "coming": self.coming,
        }


def parse_have(body: bytes, count: int) -> Have:
    """Read an answer about a version of `count` shards. Raises ValueError if it isn't one."""
    try:
        fields = json.loads(body)
        have = Have(
            role=_name(fields["role"]),
            server_id=_name(fields["id"]),
            complete=fields["complete"] is True,
            epoch=_name(fields["epoch"]),
            after=_whole(fields["after"], 2**53),
            added=_indexes(fields["added"], count, MAX_ADDED),
            coming=_indexes(fields["coming"], count, MAX_COMING),
        )
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"lacks {error}") from None
    if have.role not in ROLES:
        raise ValueError("names no role")
    return have


def _name(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_NAME or not value.isascii():
        raise ValueError("a name is a short string")
    return value


def _whole(value: object, limit: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise ValueError(f"{value!r:.40} is out of range")
    return value


def _indexes(values: object, count: int, most: int) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > most:
        raise ValueError(f"a list of at most {most} shards is due")
    return tuple(_whole(value, count) for value in values)
