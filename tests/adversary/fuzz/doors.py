"""Both doors of one coordinator, fuzzed: what came of it, and what the coordinator's process held before and after."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.adversary.fuzz import raw
from tests.adversary.fuzz.described import try_described
from tests.adversary.fuzz.grpc_door import GrpcDoor
from tests.adversary.fuzz.http_door import HttpDoor
from tests.adversary.fuzz.site import Held, Report, Site

_WARM_UP = 0.2  # of all requests: until caches, pools and arenas have their size
_DESCRIBED = 0.1  # of the HTTP requests are made by schemathesis
_RAW = 0.02  # connections of raw bytes per request


@dataclass(frozen=True, slots=True)
class Outcome:
    """`faults`: what the coordinator logged as its own."""

    reports: tuple[Report, ...]
    before: Held
    after: Held
    faults: list[str]

    @property
    def trouble(self) -> list[str]:
        return [each for report in self.reports for each in report.trouble] + self.faults

    def lines(self) -> list[str]:
        grown = (self.after.resident - self.before.resident) / 2**20
        held = f"RSS {self.before.resident / 2**20:.1f} → {self.after.resident / 2**20:.1f} MiB ({grown:+.1f})"
        return [
            *(line for report in self.reports for line in report.lines()),
            f"{held}, open files {self.before.files} → {self.after.files}",
        ]


def fuzz_doors(site: Site, http: int, grpc: int, seed: int = 0) -> Outcome:
    """`http` and `grpc` requests to an open site, with some connections of raw bytes beside them."""
    http_door, grpc_door, others = HttpDoor(site, seed), GrpcDoor(site, seed), Report()
    plain = int(http * (1 - _DESCRIBED))

    def part(begin: float, end: float) -> None:
        if plain:
            asyncio.run(http_door.run(int(plain * begin), int(plain * end)))
            try_described(site, int(http * _DESCRIBED * (end - begin)), others, seed)
        if grpc:
            asyncio.run(grpc_door.run(int(grpc * begin), int(grpc * end)))
        asyncio.run(raw.run(site, int((http + grpc) * _RAW * (end - begin)) + 3, others, seed))

    part(0.0, _WARM_UP)
    before = site.holds()
    part(_WARM_UP, 1.0)
    return Outcome((http_door.report, grpc_door.report, others), before, site.holds(), site.own_faults())
