"""Tools that a model may call in a task of several turns, by name.

A tool is a pure function from the text of a call to the text of its answer: no clock, no network, no files, no state, and no
call that takes long. It must be the same on every worker and on our side, so it lives in a module that needs nothing but the
standard library, and the digest of that module's source stands in the run's terms.

A worker runs what is installed on its own machine, never what a coordinator sends or names by path: the tools that come with
Rollswarm, and those that an installed package registers as an entry point `NAME = "package.module:function"` in the group
`rollswarm.tools`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from hashlib import sha256
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from protocol.errors import UserError
from protocol.turns import Tool

GROUP = "rollswarm.tools"
BUILT_IN = {"calculator": "environments.tools.calculator:answer"}


def known_tools() -> dict[str, EntryPoint]:
    """What can be called here. What comes with Rollswarm can't be replaced."""
    installed = {each.name: each for each in entry_points(group=GROUP)}
    return installed | {name: EntryPoint(name, place, GROUP) for name, place in BUILT_IN.items()}


def find_tool(name: str, known: Mapping[str, EntryPoint] | None = None) -> tuple[Tool, str]:
    """The tool and the digest of its module's source. Raises UserError if there is none by this name."""
    known = known_tools() if known is None else known
    if name not in known:
        raise UserError(f"there is no tool {name!r} here; there are {', '.join(sorted(known))}")
    try:
        tool: Tool = known[name].load()
        source = inspect.getsource(import_module(tool.__module__))
    except (ImportError, AttributeError, OSError, TypeError) as error:
        raise UserError(f"cannot load the tool {name!r} ({known[name].value}): {error}") from error
    return tool, "sha256:" + sha256(source.encode()).hexdigest()
