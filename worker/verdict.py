"""A rejection in one line: what was expected and what came."""

from __future__ import annotations

from protos.rollswarm.v1 import worker_pb2


def verdict_line(verdict: worker_pb2.VerdictNotice) -> str:
    """For the log and `worker status`."""
    line = f"{verdict.rollout_id[7:19]}  {verdict.outcome}"
    if verdict.reason:
        line += f" ({verdict.reason}: {verdict.detail})"
    if verdict.outcome == "rejected" and verdict.measurements:
        line += "; measured: " + ", ".join(map(_measurement, verdict.measurements))
    return line


def _measurement(found: worker_pb2.Measurement) -> str:
    bound = "at least" if found.at_least else "at most"
    return f"{found.name} {found.value:.3g} ({bound} {found.admitted:.3g})"
