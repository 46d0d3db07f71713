"""An environment whose scoring does what the completion says; the sandbox's tests load it by import path."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from protocol.rollout import Task


@dataclass(frozen=True)
class Hostile:
    name: ClassVar[str] = "hostile"
    eval_size: int = 1

    def task(self, index: int) -> Task:
        return Task(self.name, index, "", None)

    def eval_task(self, index: int) -> Task:
        return Task(self.name, -1 - index, "", None)

    def well_formed(self, completion: str) -> bool:
        return True

    def score(self, task: Task, completion: str) -> float:
        action, _, argument = completion.partition(" ")
        return getattr(self, f"_{action}")(argument)

    def _raise(self, argument: str) -> float:
        raise ValueError(argument)

    def _spin(self, argument: str) -> float:
        while True:
            pass

    def _hoard(self, argument: str) -> float:
        return float(len(bytearray(8 << 30)))

    def _die(self, argument: str) -> float:
        os._exit(3)

    def _print(self, argument: str) -> float:
        print("\0\0\0\2{}", flush=True)
        os.write(1, b"\0\0\0\2{}")
        return 1.0

    def _overpay(self, argument: str) -> float:
        return float(argument)

    def _environ(self, argument: str) -> float:
        raise ValueError(json.dumps(sorted(os.environ)))

    def _uid(self, argument: str) -> float:
        raise ValueError(str(os.getuid()))

    def _connect(self, argument: str) -> float:
        with socket.create_connection(("127.0.0.1", int(argument)), timeout=2):
            return 1.0

    def _write(self, argument: str) -> float:
        with Path(argument).open("w") as file:
            file.write("x")
        return 1.0

    def _ok(self, argument: str) -> float:
        return 1.0
