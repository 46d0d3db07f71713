"""Who asks a server, as far as they say in the header that relays send. It proves nothing and buys nothing."""

from __future__ import annotations

import enum
from dataclasses import dataclass

FROM_HEADER = "X-Shardcast-From"


class Kind(enum.Enum):
    """A `PEER` is a sibling: it is answered from what is here, so that two never send each other looking."""

    CLIENT = "client"
    RELAY = "relay"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class Asker:
    """`busy`: a sibling that has clients to serve all the time, and so can wait."""

    kind: Kind = Kind.CLIENT
    relay_id: str = ""
    busy: bool = False

    def header(self) -> dict[str, str]:
        """What is sent along with a request."""
        if self.kind is Kind.CLIENT:
            return {}
        return {FROM_HEADER: f"{self.kind.value} {self.relay_id}{' busy' if self.busy else ''}"}

    @classmethod
    def parse(cls, header: str | None) -> Asker:
        """From the header; anything unknown is a client."""
        words = (header or "").split(" ")
        if len(words) < 2 or words[0] not in (Kind.RELAY.value, Kind.PEER.value):
            return CLIENT
        return cls(Kind(words[0]), words[1][:64], "busy" in words[2:])


CLIENT = Asker()
