"""The page at `/`: what a relay volunteer or an operator wants to know at a glance. No script, nothing external."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>shardcast {role}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8884; overflow-wrap: anywhere; }}
</style></head><body>
<h1>shardcast {role}</h1>
<table>{facts}</table>
{sources}
<p><a href="/metrics">metrics</a> · <a href="/healthz">health</a></p>
</body></html>
"""


def render_page(health: Mapping[str, Any]) -> str:
    """The page for what `Catalog.health` says."""
    facts = "".join(
        f"<tr><th>{escape(label)}</th><td>{escape(_text(health.get(key)))}</td></tr>"
        for label, key in (
            ("state", "status"),
            ("newest version announced", "head"),
            ("its digest", "head_digest"),
            ("newest version complete here", "complete"),
            ("versions here", "versions"),
            ("being received", "receiving"),
            ("next free number", "next_version"),
            ("deltas that failed, as clients tell", "delta_fallbacks"),
        )
    )
    return _PAGE.format(role=escape(str(health["role"])), facts=facts, sources=_sources(health["sources"]))


def _sources(sources: Sequence[Mapping[str, Any]]) -> str:
    if not sources:
        return ""
    rows = "".join(
        f"<tr><td>{escape(str(source['url']))}</td><td>{escape(str(source['state']))}</td>"
        f"<td>{source['mbytes_per_s']}</td><td>{escape(str(source['last_fault']))}</td></tr>"
        for source in sources
    )
    return (
        "<h2>Sources</h2><table><tr><th>source</th><th>state</th><th>MB/s per request</th><th>last fault</th></tr>"
        f"{rows}</table>"
    )


def _text(value: Any) -> str:
    if value is None or value == []:
        return "none yet"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return str(value)
