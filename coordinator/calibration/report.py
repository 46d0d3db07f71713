"""What a calibration leaves: thresholds.toml for the run file, evidence.json, and a plot of the tails."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.calibration.fit import Fit
from coordinator.calibration.measures import Measure, by_setting
from coordinator.calibration.pooled import pooled_lines
from coordinator.verification.thresholds import Thresholds

_QUANTILES = (0.5, 0.9, 0.99, 1.0)


def to_toml(thresholds: Thresholds) -> str:
    """Thresholds as a TOML file that `Thresholds.from_toml` reads."""
    values = thresholds.to_mapping()
    chunks = values.pop("chunks")
    del values["pooled"]
    lines = ["# Written by `coordinator calibrate`. evidence.json says what was measured."]
    lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    for chunk in chunks:
        lines += ["", "[[chunks]]", *(f"{name} = {json.dumps(value)}" for name, value in chunk.items())]
    return "\n".join([*lines, *pooled_lines(thresholds.pooled)]) + "\n"


def evidence(fit: Fit, measures: Sequence[Measure], bound: Mapping[str, Any]) -> dict[str, Any]:
    """Sample sizes, quantiles, tails and versions behind the thresholds. `bound`: what false bans were bounded to."""
    return {
        "bound": dict(bound),
        "calibrated_on": fit.calibrated_on,
        "tried_on": fit.tried_on,
        "exceeded_in_trial": fit.exceeded,
        "tails": {
            name: {
                "values": tail.count,
                "largest": tail.largest,
                "start": tail.start,
                "scale": tail.scale,
                "shape": tail.shape,
            }
            for name, tail in fit.tails.items()
        },
        "settings": _by_setting(measures),
        "software": {name: metadata.version(name) for name in ("torch", "transformers", "numpy")},
        "machine": platform.machine(),
    }


def write(folder: Path, fit: Fit, facts: Mapping[str, Any]) -> Path:
    """Write the three files; the path of thresholds.toml, which is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evidence.json").write_text(json.dumps(facts, indent=1) + "\n")
    _plot(folder / "tails.png", fit)
    path = folder / "thresholds.toml"
    path.write_text(to_toml(fit.thresholds))
    return path


def _by_setting(measures: Sequence[Measure]) -> list[dict[str, Any]]:
    return [
        {
            "engine": engine,
            "verifier": verifier,
            "rollouts": len(items),
            "tokens": sum(item.tokens for item in items),
            "gap_max": _quantiles([item.gap_max for item in items]),
            "margin_max": _quantiles([item.margin_max for item in items]),
            "mantissa_mean": _quantiles([chunk.mantissa_mean for item in items for chunk in item.chunks]),
            "exponent_mismatches": _quantiles([chunk.exponent_mismatches for item in items for chunk in item.chunks]),
        }
        for (engine, verifier), items in by_setting(measures).items()
    ]


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {f"{q:g}": round(float(np.quantile(values, q)), 5) for q in _QUANTILES}


def _plot(path: Path, fit: Fit) -> None:
    """For each threshold: where the sample ends, and where the fitted tail puts the threshold."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(fit.tails)
    figure, axes = pyplot.subplots(len(names), 1, figsize=(7, 0.55 * len(names) + 1.2), constrained_layout=True)
    for axis, name in zip(np.atleast_1d(axes), names, strict=True):
        tail = fit.tails[name]
        admitted = _admitted(fit.thresholds, name)
        axis.barh([0], [tail.start], color="#4878a8", height=0.6)
        axis.barh([0], [max(0.0, tail.largest - tail.start)], left=[tail.start], color="#9dbbd8", height=0.6)
        axis.axvline(admitted, color="#b03030")
        axis.set_yticks([])
        axis.set_xlim(0, admitted * 1.1 or 1.0)
        axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        axis.tick_params(labelsize=7)
    figure.suptitle("90 % of honest values, the largest seen, and the threshold (red)", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _admitted(thresholds: Thresholds, name: str) -> float:
    if not name.startswith("chunks."):
        return float(getattr(thresholds, name))
    _, low, number = name.split(".")
    return float(getattr(thresholds.for_chunk(int(low)), f"{number}_max"))
