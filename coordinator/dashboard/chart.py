"""A line chart as inline SVG: drawn on our side, so the page needs no script and prints anywhere."""

from __future__ import annotations

from collections.abc import Sequence

_WIDTH, _HEIGHT, _PAD = 640.0, 150.0, 6.0


def line_chart(values: Sequence[float], *, low: float | None = None, high: float | None = None) -> str:
    """Points and a label for the lowest, highest and last value; an empty string if there are none.

    `low`, `high`: fixed bounds of the vertical axis; else those of the values.
    """
    if not values:
        return ""
    bottom = min(values) if low is None else low
    top = max(values) if high is None else high
    if top <= bottom:
        top = bottom + 1.0
    step = (_WIDTH - 2 * _PAD) / max(1, len(values) - 1)

    def place(index: int, value: float) -> str:
        share = min(1.0, max(0.0, (value - bottom) / (top - bottom)))
        return f"{_PAD + index * step:.1f},{_HEIGHT - _PAD - share * (_HEIGHT - 2 * _PAD):.1f}"

    points = [place(index, value) for index, value in enumerate(values)]
    last = points[-1].split(",")
    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{len(values)} points, from {values[0]:.3g} to {values[-1]:.3g}">'
        f'<polyline points="{" ".join(points)}"/><circle cx="{last[0]}" cy="{last[1]}" r="3"/></svg>'
    )
