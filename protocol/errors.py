"""One tree of errors, drawn by whose fault it is.

    RollswarmError
    ├── UserError          the person who typed it: bad flag, run file, key file, URL
    ├── WorkerFault        a worker sent something wrong; carries a RejectionReason
    │   └── BadSignature   an envelope that its key did not sign
    ├── Busy               somebody asks for more than we can give now; says when to come back
    ├── SourceFault        a relay or origin served something wrong or too slowly
    ├── EnvironmentFault   a task or a reward raised, or ran out of its limits
    └── OurFault           our own process failed; never counted against a worker

Every message says what happened and what to do; `fault` names the party for metrics and logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar


class RollswarmError(Exception):
    """Base of all errors that Rollswarm raises on purpose."""

    fault: ClassVar[str] = "us"


class UserError(RollswarmError, ValueError):
    """The user's mistake. The command line prints it as one line and exits with status 2."""

    fault = "user"


class WorkerFault(RollswarmError):
    """A worker sent something that the protocol forbids.

    `reason` is a `protocol.rollout.RejectionReason` value, `detail` a sentence the worker can act on.
    """

    fault = "worker"

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class BadSignature(WorkerFault):
    """The envelope was not signed by the key that it names, or names a key that is not pinned."""

    def __init__(self, detail: str) -> None:
        super().__init__("signature", detail)


class Busy(RollswarmError):
    """More is asked for than is given at the moment. Nobody's fault; the same call may succeed after `retry_after_s`."""

    fault = "nobody"

    def __init__(self, detail: str, retry_after_s: float) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class SourceFault(RollswarmError):
    """A relay or an origin served wrong bytes, an oversized answer, or nothing in time."""

    fault = "source"


class EnvironmentFault(RollswarmError):
    """A task or a reward function raised or exceeded its limits: the verdict is INCONCLUSIVE."""

    fault = "environment"


class OurFault(RollswarmError):
    """A failure of our own process. Tried again elsewhere, never held against a worker."""

    fault = "us"


def explain_validation(errors: Iterable[Mapping[str, Any]], source: str) -> str:
    """Turn pydantic's `exc.errors()` into one line that names the field, what is wrong and what came.

    >>> explain_validation([{"loc": ("scheduling", "max_staleness"), "msg": "too small", "input": -1}], "run.toml")
    'run.toml: scheduling.max_staleness: too small (got -1)'
    """
    found = list(errors)
    parts = []
    for error in found:
        if error.get("type") == "too_short" and any(_is_inside(other, error) for other in found):
            continue  # it counts what is valid alone
        field = ".".join(str(part) for part in error.get("loc", ())) or "(whole file)"
        given = "" if error.get("type") == "missing" else f" (got {error.get('input')!r:.60})"
        said = str(error.get("msg", "invalid")).removeprefix("Value error, ")
        problem = "no field has this name" if error.get("type") == "extra_forbidden" else said
        parts.append(f"{field}: {problem}{given}")
    return f"{source}: " + "; ".join(parts)


def _is_inside(error: Mapping[str, Any], outer: Mapping[str, Any]) -> bool:
    """Whether `error` is about a part of the field that `outer` is about."""
    place, around = tuple(error.get("loc", ())), tuple(outer.get("loc", ()))
    return len(place) > len(around) and place[: len(around)] == around
