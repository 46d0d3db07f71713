"""The page at `/`: what a relay volunteer or an operator wants to know at a glance. No script, nothing external."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
:root { --ink: #1c2126; --dim: #5d6873; --paper: #f7f8f9; --card: #fff; --line: #dfe4e8; --accent: #0b6bcb; --bad: #b3261e;
  color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaee; --dim: #97a3ae; --paper: #12161a; --card: #1a2026; --line: #2c343c; --accent: #6bb3ff;
    --bad: #ff8a80; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 20px 16px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; }
h2 { font-size: 1rem; margin: 28px 0 8px; }
header p { margin: 2px 0 16px; overflow-wrap: anywhere; color: var(--dim); }
.bad, header p.bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.tiles b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.tiles b small { font-size: .9rem; font-weight: 400; color: var(--dim); }
.tiles span, th, footer { color: var(--dim); font-size: .85rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; background: var(--card); }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 6px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child th, tr:last-child td { border-bottom: 0; }
th { font-weight: 500; white-space: nowrap; }
td { white-space: nowrap; }
.wide { white-space: normal; overflow-wrap: anywhere; min-width: 14em; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
progress { width: 100%; min-width: 8em; height: .7em; accent-color: var(--accent); vertical-align: middle; }
footer { margin-top: 24px; }
a { color: var(--accent); }
"""


def render_page(health: Mapping[str, Any]) -> str:
    """The page for what `Catalog.health` says."""
    role = escape(str(health["role"]))
    fine = health["status"] == "ok"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>shardcast {role}</title><style>{_STYLE}</style></head><body>"
        f"<header><h1>shardcast {role}</h1>"
        f"<p{'' if fine else ' class=bad'}>{'all is well' if fine else escape(str(health['status']))}</p></header>"
        f"{_tiles(health)}{_receiving(health.get('receiving') or ())}{_sources(health['sources'])}{_facts(health)}"
        '<footer><a href="/metrics">metrics</a> · <a href="/healthz">health</a></footer></body></html>'
    )


def _tiles(health: Mapping[str, Any]) -> str:
    behind = ("unknown", "") if not health.get("following", True) else (f"{health.get('behind_s', 0.0):.0f}", " s")
    tiles = [
        (_text(health.get("complete")), "", "newest version here"),
        (*behind, "behind the newest"),
        (f"{health.get('mbytes_per_s_out', 0.0):.1f}", " MB/s", "sent now"),
        (f"{health.get('mbytes_per_s_in', 0.0):.1f}", " MB/s", "received now"),
        (f"{health.get('bytes_sent', 0) / 2**30:.1f}", " GiB", "sent since the start"),
    ]
    if "quota_left_bytes" in health:
        tiles.append((f"{health['quota_left_bytes'] / 2**30:.1f}", " GiB", "left of this month's quota"))
    return (
        '<div class="tiles">'
        + "".join(
            f"<div><b>{escape(value)}<small>{unit}</small></b><span>{label}</span></div>"
            for value, unit, label in tiles
        )
        + "</div>"
    )


def _receiving(versions: Iterable[Mapping[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>version {int(each['version'])}</td>"
        f'<td style="width:60%"><progress max="{int(each["of"])}" value="{int(each["have"])}"></progress></td>'
        f'<td class="n">{int(each["have"])} of {int(each["of"])} shards</td></tr>'
        for each in versions
    )
    return f'<h2>On its way here</h2><div class="scroll"><table>{rows}</table></div>' if rows else ""


def _sources(sources: Sequence[Mapping[str, Any]]) -> str:
    if not sources:
        return ""
    rows = "".join(
        f'<tr><td class="wide">{escape(str(source["url"]))}</td><td>{"sibling" if source.get("peer") else "upstream"}</td>'
        f"<td{'' if source['state'] == 'ok' else ' class=bad'}>{escape(str(source['state']))}</td>"
        f'<td class="n">{source["mbytes_per_s"]}</td><td class="wide">{escape(_fault(source))}</td></tr>'
        for source in sources
    )
    return (
        '<h2>Sources</h2><div class="scroll"><table><tr><th>source</th><th></th><th>state</th>'
        f'<th class="n">MB/s per request</th><th>last fault</th></tr>{rows}</table></div>'
    )


def _facts(health: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th>{label}</th><td class="wide">{escape(_text(health.get(key)))}</td></tr>'
        for label, key in (
            ("newest version announced", "head"),
            ("its digest", "head_digest"),
            ("versions here", "versions"),
            ("next free number", "next_version"),
            ("key rotations", "key_rotations"),
            ("deltas of no use, as clients tell", "delta_fallbacks"),
        )
    )
    return f'<h2>Versions</h2><div class="scroll"><table>{rows}</table></div>'


def _fault(source: Mapping[str, Any]) -> str:
    return str(source["last_fault"]).removeprefix(f"{source['url']}: ")


def _text(value: Any) -> str:
    if value is None or value == []:
        return "none yet"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return str(value)
