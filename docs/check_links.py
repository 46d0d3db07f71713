"""`make docs`: every relative link in the project's pages leads to a file, and every #anchor to a heading."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[[^\]\[]+\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_HIDDEN = {".venv", ".git", ".cache", "runs", "build", "node_modules", ".pytest_cache"}


def pages(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.md") if not _HIDDEN & set(path.relative_to(root).parts))


def links(text: str) -> Iterator[str]:
    """Targets of the links outside of code. A link's text may be code."""
    prose = _FENCE.sub("", text)
    for found in _LINK.finditer(prose):
        yield found[1]


def anchors(text: str) -> set[str]:
    """The names that headings get: lower case, spaces to hyphens, punctuation dropped."""
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(plain.strip().replace(" ", "-"))
    return found


def broken(page: Path) -> list[str]:
    """What is wrong with a page's links, in words."""
    problems = []
    for target in links(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue  # elsewhere: nothing outside is asked
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists():
            problems.append(f"{page}: {target} is not there")
        elif anchor and linked.suffix == ".md" and anchor not in anchors(linked.read_text()):
            problems.append(f"{page}: {target}: no such heading")
    return problems


def unreachable(root: Path) -> list[str]:
    """Pages of docs/ that no other page links to."""
    linked = set()
    for page in pages(root):
        for target in links(page.read_text()):
            path = target.partition("#")[0]
            if path and not re.match(r"[a-z]+:", path):
                linked.add((page.parent / path).resolve())
    return [f"{page}: no page links to it" for page in sorted((root / "docs").glob("*.md")) if page not in linked]


def main() -> int:
    found = [problem for page in pages(ROOT) for problem in broken(page)] + unreachable(ROOT)
    print("\n".join(found) or f"{len(pages(ROOT))} pages, no broken link")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
