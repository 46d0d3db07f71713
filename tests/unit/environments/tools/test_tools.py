"""Tools by name: what is installed here, and nothing that anybody else names."""

from __future__ import annotations

import ast
import inspect
import sys
from importlib import import_module
from importlib.metadata import EntryPoint

import pytest

from environments.tools import BUILT_IN, GROUP, find_tool, known_tools
from protocol.errors import UserError


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_tool_is_named_by_a_digest_that_says_all_about_it(name: str) -> None:
    tool, digest = find_tool(name)
    assert digest.startswith("sha256:") and digest == find_tool(name)[1]
    assert tool("") and isinstance(tool(""), str)
    module = import_module(tool.__module__)
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name) or ""
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {each.partition(".")[0] for each in imported} <= {*sys.stdlib_module_names}, (
        "its source is all there is of it"
    )


def test_a_path_is_no_name() -> None:
    for name in ("os:system", "environments.tools.calculator:answer", "", "calculators"):
        with pytest.raises(UserError, match=r"there is no tool .* there are calculator"):
            find_tool(name)


def test_an_installed_package_may_bring_tools_and_replace_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [
        EntryPoint("shout", "tests.turns:backwards", GROUP),
        EntryPoint("calculator", "os:system", GROUP),
        EntryPoint("broken", "tests.turns:nothing", GROUP),
    ]
    monkeypatch.setattr("environments.tools.entry_points", lambda group: installed)
    assert set(known_tools()) == {"shout", "calculator", "broken"}
    assert find_tool("shout")[0]("abc") == "<cba>"
    assert find_tool("calculator")[0]("1+1") == "2"
    with pytest.raises(UserError, match="cannot load the tool 'broken'"):
        find_tool("broken")
