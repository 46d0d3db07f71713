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
@media (max-width: 40rem) {
  th { white-space: normal; }
  .wide { min-width: 0; }
  .stack tr { display: block; border-bottom: 1px solid var(--line); padding: 4px 0; }
  .stack tr:last-child, .stack td { border-bottom: 0; }
  .stack tr:has(th) { display: none; }
  .stack td { display: block; white-space: normal; overflow-wrap: anywhere; padding: 2px 10px; text-align: left; }
  .stack td:empty { display: none; }
  .stack td[title]::before { content: attr(title) ": "; color: var(--dim); }
}
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
    behind = ("unknown", "") if not health.get("following", True) else (f"{health.get('behind_s', 0.0):.0f}", "s")
    tiles = [
        (text_of(health.get("complete")), "", "newest version here"),
        (*behind, "behind the newest"),
        (f"{health.get('mbytes_per_s_out', 0.0):.1f}", "MB/s", "sent now"),
        (f"{health.get('mbytes_per_s_in', 0.0):.1f}", "MB/s", "received now"),
        (*amount(health.get("bytes_sent", 0)), "sent since the start"),
    ]
    if "quota_left_bytes" in health:
        tiles.append((*amount(health["quota_left_bytes"]), "left of this month's quota"))
    return (
        '<div class="tiles">'
        + "".join(
            f"<div><b>{escape(value)}<small> {unit}</small></b><span>{label}</span></div>"
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
        f'<td class="n" title="MB/s per request">{source["mbytes_per_s"]}</td>'
        f'<td class="wide" title="last fault">{escape(_fault(source)) or "none"}</td></tr>'
        for source in sources
    )
    return (
        '<h2>Sources</h2><div class="scroll"><table class="stack"><tr><th>source</th><th></th><th>state</th>'
        f'<th class="n">MB/s per request</th><th>last fault</th></tr>{rows}</table></div>'
    )


def _facts(health: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th>{label}</th><td class="wide">{escape(text_of(health.get(key)))}</td></tr>'
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


def amount(count: int) -> tuple[str, str]:
    """Bytes as a person reads them, with the unit.

    >>> amount(12 * 10**6), amount(3 * 2**40)
    (('11.4', 'MiB'), ('3.0', 'TiB'))
    """
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.{0 if units[0] == 'B' else 1}f}", units[0]


def text_of(value: Any) -> str:
    """A fact as a person reads it.

    >>> text_of(None), text_of([]), text_of([5, 6]), text_of(7)
    ('none yet', 'none yet', '5, 6', '7')
    """
    if value is None or value == []:
        return "none yet"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return str(value)
