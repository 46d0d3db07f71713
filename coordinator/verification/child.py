"""The process in which rollouts are examined: asked over a pipe, one thing at a time.

Down the pipe come Python objects of our own; back go JSON texts, since whoever had got hold of this process by what it has
to read should not get hold of its parent by what it answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from protocol.errors import RollswarmError
from protocol.rollout import Outcome, RejectionReason, Verdict

READY = b'"ready"'


def serve(pipe: Connection, maker: str, settings: Any) -> None:
    """Make the examiner that `maker` ("module:Class") names, and answer until the parent is gone."""
    with contextlib.suppress(OSError):  # where there is no such thing
        os.setsid()  # what it starts itself ends with it, by its group
        # Before the parent, which holds the claims: out of memory, it is this process that goes.
        Path("/proc/self/oom_score_adj").write_text("1000")
    threading.Thread(target=_end_with_parent, name="end with the verifier", daemon=True).start()
    module, _, name = maker.partition(":")
    examiner = getattr(import_module(module), name)(settings)
    pipe.send_bytes(READY)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send_bytes(_answer(getattr(examiner, method), arguments))


def _end_with_parent() -> None:
    """Also while a rollout hangs this process: a verifier that was killed can't end it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _answer(method: Callable[..., Any], arguments: Mapping[str, Any]) -> bytes:
    try:
        answer = method(**arguments)
    except RollswarmError as error:
        return json.dumps({"fault": str(error)}).encode()
    except Exception as error:
        return json.dumps({"unforeseen": f"{type(error).__name__}: {error}"}).encode()
    verdicts = {key: dataclasses.asdict(verdict) for key, verdict in (answer or {}).items()}
    return json.dumps({"verdicts": verdicts}).encode()


def read_verdicts(answer: Mapping[str, Any], asked: set[str]) -> dict[str, Verdict]:
    """Verdicts out of an answer. Raises ValueError, TypeError or KeyError if they are none, or others than were asked."""
    found = {key: _verdict(fields) for key, fields in answer["verdicts"].items()}
    if found.keys() != asked:
        raise ValueError("verdicts on other rollouts than were asked")
    return found


def _verdict(fields: Mapping[str, Any]) -> Verdict:
    return Verdict(
        outcome=Outcome(fields["outcome"]),
        reason=None if fields["reason"] is None else RejectionReason(fields["reason"]),
        detail=str(fields["detail"]),
        reward=None,  # not this process's to say
        audited=bool(fields["audited"]),
        old_logprobs=tuple(map(float, fields["old_logprobs"])),
        entropies=tuple(map(float, fields["entropies"])),
        metrics=_numbers(fields["metrics"]),
        admitted=_numbers(fields["admitted"]),
        observations=_numbers(fields["observations"]),
    )


def _numbers(fields: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in fields.items()}
