"""What the runs say: gain by objective and lag, what is kept of the gain at lag 0, and a figure."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.staleness.lab import Setting

# 95th percentile of Student's t by degrees of freedom: a two-sided 90 % interval of a mean.
_T = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}


def interval(values: list[float]) -> tuple[float, float]:
    """(mean, half of its 90 % interval by Student's t)."""
    if len(values) < 2:
        return fmean(values), 0.0
    return fmean(values), _T.get(len(values) - 1, 1.7) * stdev(values) / math.sqrt(len(values))


def cells(runs: list[dict[str, Any]]) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Runs by objective and lag, in order of seed."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for run in sorted(runs, key=lambda run: (run["objective"], run["lag"], run["seed"])):
        found.setdefault(run["objective"], {}).setdefault(run["lag"], []).append(run)
    return found


def kept(by_lag: dict[int, list[dict[str, Any]]], lag: int) -> tuple[float, float] | None:
    """(share of the lag-0 gain that is kept, half of its 90 % interval), over seeds that both lags have."""
    base = {run["seed"]: run["gain"] for run in by_lag.get(0, [])}
    pairs = [(run["gain"], base[run["seed"]]) for run in by_lag.get(lag, []) if run["seed"] in base]
    if not pairs:
        return None
    mean = fmean(gain for _, gain in pairs)
    # Against the mean gain at lag 0: a ratio of single runs would be dominated by the unlucky ones.
    return interval([gain / mean for gain, _ in pairs])


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """By objective and lag: gain, share kept, share of tokens cut at the full lag, effective sample size."""
    result: dict[str, Any] = {}
    for name, by_lag in cells(runs).items():
        for lag, here in by_lag.items():
            mean, half = interval([run["gain"] for run in here])
            share = kept(by_lag, lag)
            result.setdefault(name, {})[str(lag)] = {
                "seeds": len(here),
                "gain": [mean, mean - half, mean + half],
                "kept": None if share is None else [share[0], share[0] - share[1], share[0] + share[1]],
                "cut": fmean(run["metrics"]["cut_fraction"] for run in here),
                "effective_sample_size": fmean(run["metrics"]["effective_sample_size"] for run in here),
            }
    return result


def table(runs: list[dict[str, Any]]) -> str:
    """The same for people."""
    lines = [f"{'objective':12} {'lag':>4} {'gain':>16} {'kept':>14} {'cut':>7} {'ESS':>5}"]
    for name, by_lag in summary(runs).items():
        for lag, cell in by_lag.items():
            gain = f"{cell['gain'][0]:.3f} ± {cell['gain'][2] - cell['gain'][0]:.3f}"
            share = "–" if cell["kept"] is None else f"{cell['kept'][0]:.0%} ± {cell['kept'][2] - cell['kept'][0]:.0%}"
            size = cell["effective_sample_size"]
            lines.append(f"{name:12} {lag:>4} {gain:>16} {share:>14} {cell['cut']:7.2%} {size:5.2f}")
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]], setting: Setting, path: Path) -> None:
    """Held-out gain against lag, one line per objective, with 90 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "rollswarm"  # the same file from the same runs
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.8))
    lags = sorted({run["lag"] for run in runs})
    for number, (name, by_lag) in enumerate(cells(runs).items()):
        here = [lag for lag in lags if lag in by_lag]
        points = [interval([run["gain"] for run in by_lag[lag]]) for lag in here]
        places = [lags.index(lag) + 0.06 * (number - 2.5) for lag in here]
        axes.errorbar(
            places, [mean for mean, _ in points], [half for _, half in points], marker="o", ms=4, capsize=2, label=name
        )
    axes.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    axes.set_xlabel("lag (batches; one version each)")
    axes.set_ylabel("gain in held-out reward")
    seeds = len({run["seed"] for run in runs})
    axes.set_title(f"{setting.steps} steps at rate {setting.learning_rate}, {seeds} seeds, 90 % intervals", fontsize=10)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
