"""What the demo showed, read from what happened: the database and the two evaluations. Nothing is set by hand."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demo.presets import Preset
from trainer.scoring import paired_difference

_TAKEN = "('accepted', 'served', 'trained')"


def make_report(
    database: Path,
    preset: Preset,
    *,
    honest: str,
    cheater: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """The report; `honest` and `cheater` are key ids, `seconds` the time from the first process to the last step."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        facts = _facts(connection, honest, cheater)
    finally:
        connection.close()
    gain = paired_difference(before["sampled"]["scores"], after["sampled"]["scores"])
    report: dict[str, Any] = {
        "preset": preset.name,
        "model": preset.model_name,
        "eval_tasks": before["tasks"],
        "eval_before": {mode: before[mode]["accuracy"] for mode in ("sampled", "greedy")},
        "eval_after": {mode: after[mode]["accuracy"] for mode in ("sampled", "greedy")},
        "eval_gain": gain.mean,
        "eval_gain_ci95": [gain.low, gain.high],
        "format_rate": {"before": before["sampled"]["format_rate"], "after": after["sampled"]["format_rate"]},
        "accuracy_given_format": {
            "before": before["sampled"]["accuracy_given_format"],
            "after": after["sampled"]["accuracy_given_format"],
        },
        **facts,
        "max_staleness_allowed": preset.max_staleness,
        "seconds": round(seconds, 1),
    }
    report["checks"] = _checks(report, preset)
    return report


def _facts(connection: sqlite3.Connection, honest: str, cheater: str) -> dict[str, Any]:
    def one(statement: str, *values: Any) -> int:
        return int(connection.execute(statement, values).fetchone()[0] or 0)

    accepted = (
        "SELECT count(*) FROM verdicts v JOIN rollouts r USING (rollout_id) "
        "WHERE v.outcome = 'accepted' AND r.worker_id = ?"
    )
    rejected = "SELECT rejected FROM workers WHERE worker_id = ?"
    return {
        "policy_versions": one("SELECT count(*) FROM policy_versions"),
        "in_flight_swaps": one(f"SELECT count(*) FROM rollouts WHERE spans > 1 AND state IN {_TAKEN}"),
        "rollouts_received": one("SELECT count(*) FROM rollouts"),
        "rollouts_trained": one("SELECT count(*) FROM consumptions WHERE trained"),
        "rollouts_served": one("SELECT count(*) FROM consumptions"),
        "tokens_verified": one("SELECT sum(credits) FROM workers"),
        "max_staleness_seen": one("SELECT max(staleness) FROM consumptions"),
        "honest_accepted": one(accepted, honest),
        "honest_rejected": one(rejected, honest),
        "cheater_accepted": one(accepted, cheater),
        "cheater_rejected": one(rejected, cheater),
        "cheater_banned": bool(one("SELECT banned FROM workers WHERE worker_id = ?", cheater)),
        "drops": dict(connection.execute("SELECT reason, sum(count) FROM drops GROUP BY reason").fetchall()),
        "unbalanced_ledgers": one(
            "SELECT count(*) FROM workers w WHERE w.credits != (SELECT coalesce(sum(amount), 0) FROM ledger l "
            "WHERE l.worker_id = w.worker_id AND l.kind = 'credit')"
        ),
        "reward_by_step": _series(connection, "reward_mean"),
        "reward_by_step_environment": {
            name: _series(connection, f"reward_mean/{name}") for name in ("arithmetic", "counting")
        },
    }


def _series(connection: sqlite3.Connection, name: str) -> list[float]:
    rows = connection.execute("SELECT metrics FROM steps ORDER BY batch").fetchall()
    metrics = [json.loads(row[0]) for row in rows]
    return [round(each[name], 4) for each in metrics if name in each]


def _checks(report: Mapping[str, Any], preset: Preset) -> dict[str, bool]:
    """What the demo promises, and whether it held."""
    return {
        f"the gain's interval lies above {preset.gain_floor}": report["eval_gain_ci95"][0] > preset.gain_floor,
        "at least 10 policy versions": report["policy_versions"] >= 10,
        "a rollout with two spans was accepted": report["in_flight_swaps"] >= 1,
        "no honest rollout was rejected": report["honest_rejected"] == 0,
        "no cheated rollout was accepted": report["cheater_accepted"] == 0 and report["cheater_rejected"] > 0,
        "the cheater is banned": report["cheater_banned"],
        "staleness stayed within its bound": report["max_staleness_seen"] <= preset.max_staleness,
        "credits equal the ledger": report["unbalanced_ledgers"] == 0,
    }


def plot_reward(report: Mapping[str, Any], path: Path) -> None:
    """The reward of each step as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), dpi=120)
    rewards: Sequence[float] = report["reward_by_step_environment"]["arithmetic"] or report["reward_by_step"]
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o", color="#0b6bcb", label="arithmetic, training batches")
    for label, value in (("before", report["eval_before"]["sampled"]), ("after", report["eval_after"]["sampled"])):
        axes.axhline(value, linestyle="--", linewidth=1, color="#888")
        axes.annotate(f"held out {label}: {value:.2f}", (len(rewards), value), ha="right", va="bottom", fontsize=9)
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1.02), title=f"{report['model']}: reward")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
