"""The process that scores: `python -m environments.scorer`, a child of `environments.sandbox.Scorer`.

It answers one request at a time over its standard input and output, each a 4-byte big-endian length and JSON:
`{"environment", "params", "task": {…}, "completion"}` → `{"score": 0.0}` or `{"error": "…"}`.
Before the first request it gives up its privileges, its network where the system allows that, and bounds its memory,
files and CPU time per item; what an environment prints goes nowhere, so it can't forge an answer by accident.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import resource
import struct
import sys
from typing import BinaryIO

from environments.base import Environment
from environments.registry import make_environment
from protocol.rollout import Task

LENGTH = struct.Struct(">I")
MAX_MESSAGE_BYTES = 4 << 20
_CLONE_NEWNET = 0x40000000
_PR_SET_NO_NEW_PRIVS = 38


def main() -> None:
    """Serve until the parent closes our input. Arguments: memory limit in bytes, CPU seconds per item."""
    memory_bytes, cpu_seconds = int(sys.argv[1]), int(sys.argv[2])
    requests, answers = _take_over_streams()
    ready = read_message(requests)
    if ready is None:
        return
    environments: dict[str, Environment] = {}
    try:
        for name, params in ready["preload"]:
            _environment(environments, name, params).eval_task(0)
    except Exception as error:  # the parent must say what is wrong with the environment
        write_message(answers, {"error": f"{type(error).__name__}: {error}"[:1000]})
        return
    _drop_privileges()
    _limit(memory_bytes)
    write_message(answers, {"ready": True, "uid": os.getuid()})
    while (request := read_message(requests)) is not None:
        _limit_cpu(cpu_seconds)
        write_message(answers, _answer(environments, request))


def _answer(environments: dict[str, Environment], request: dict) -> dict:
    try:
        environment = _environment(environments, request["environment"], request["params"])
        score = float(environment.score(Task(**request["task"]), request["completion"]))
    except Exception as error:  # whatever it is, it is the environment's, and the parent must hear of it
        return {"error": f"{type(error).__name__}: {error}"[:1000]}
    if not 0.0 <= score <= 1.0:
        return {"error": f"the score {score} is not in [0, 1]"}
    return {"score": score}


def _environment(cache: dict[str, Environment], name: str, params: dict) -> Environment:
    key = json.dumps([name, params], sort_keys=True)
    if key not in cache:
        cache[key] = make_environment(name, params)
    return cache[key]


def read_message(stream: BinaryIO) -> dict | None:
    """The next message, or None at the end of the stream."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(header)
    body = stream.read(size)
    return json.loads(body) if len(body) == size else None


def write_message(stream: BinaryIO, message: dict) -> None:
    """Write one message and flush it."""
    stream.write(encode(message))
    stream.flush()


def encode(message: dict) -> bytes:
    """A message as length and JSON bytes. Raises ValueError beyond MAX_MESSAGE_BYTES."""
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return LENGTH.pack(len(body)) + body


def _take_over_streams() -> tuple[BinaryIO, BinaryIO]:
    """Keep the pipes for ourselves and point the usual descriptors elsewhere."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)
    return requests, answers


def _drop_privileges() -> None:
    """Become `nobody` without a network if we are root, and never gain privileges again."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getuid() == 0:
        if hasattr(libc, "unshare"):
            libc.unshare(_CLONE_NEWNET)  # best effort: containers may forbid it
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu(seconds: int) -> None:
    """Allow `seconds` more of CPU time than we have used: the limit is per process, the promise per item."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main()
