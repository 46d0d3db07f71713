"""Every metric that an alert, a dashboard or an autoscaler names is one that the code exports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from coordinator.metrics import Metrics
from shardcast.metrics import ShardcastMetrics

DEPLOY = Path(__file__).parents[3] / "deploy"
_NAME = re.compile(r"\brollswarm_[a-z_]+\b")
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def exported() -> set[str]:
    """Names of all series, as Prometheus sees them."""
    registries: list[CollectorRegistry] = [Metrics().registry, ShardcastMetrics().registry]
    return {
        metric.name + suffix
        for registry in registries
        for metric in registry.collect()
        for suffix in _SUFFIXES[metric.type]
    }


def used() -> dict[Path, set[str]]:
    files = [
        *DEPLOY.glob("prometheus/*.yml"),
        *DEPLOY.glob("grafana/dashboards/*.json"),
        DEPLOY / "kubernetes/keda/scaler.yaml",
    ]
    return {path: set(_NAME.findall(path.read_text())) for path in files}


def test_all_metrics_that_are_named_are_exported() -> None:
    names = exported()
    assert {"rollswarm_policy_version", "rollswarm_shardcast_bytes_total"} <= names
    unknown = {path.name: wrong for path, found in used().items() if (wrong := found - names)}
    assert not unknown


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("grafana/dashboards/*.json")), ids=lambda path: path.stem)
def test_a_dashboard_is_whole(path: Path) -> None:
    board = json.loads(path.read_text())
    panels = board["panels"]
    assert board["uid"] and board["title"] and panels
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"] and panel["datasource"]["uid"] == "prometheus", panel
        assert all(target["expr"] for target in panel["targets"])


def test_every_metric_of_the_run_is_on_a_dashboard() -> None:
    shown = set().union(*(names for path, names in used().items() if path.suffix == ".json"))
    registry = ShardcastMetrics().registry
    for metric in registry.collect():
        assert any(metric.name + suffix in shown for suffix in _SUFFIXES[metric.type]), metric.name
