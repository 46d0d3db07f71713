"""Prometheus metrics of one coordinator process, and those read from the database at each scrape."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from coordinator.store.summary import Summary


class Metrics:
    """Counters of this process and gauges of the run's state, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"rollswarm_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"rollswarm_{name}", text, labels, registry=self.registry)

        self.leases_granted = counter("leases_granted_total", "Leases granted by this process")
        self.received = counter("rollouts_received_total", "Submissions given a receipt by this process")
        self.received_bytes = counter("rollout_bytes_total", "Payload bytes given a receipt by this process")
        self.refused = counter("rollouts_refused_total", "Submissions refused at the door, by reason", ("reason",))
        self.busy = counter("busy_total", "Calls turned away for now, by limit", ("limit",))
        self.head_version = gauge("policy_version", "Newest policy version")
        self.rollouts = gauge("rollouts", "Rollouts by state", ("state",))
        self.rejections = gauge("rejections", "Rejected or refused rollouts by reason", ("reason",))
        self.drops = gauge("drops", "Rollouts dropped, by reason", ("reason",))
        self.workers = gauge("workers", "Workers by standing", ("standing",))
        self.hardware = gauge("hardware_classes", "Kinds of hardware by state", ("state",))
        self.shadow = gauge("shadow_rollouts", "Verdicts on rollouts in shadow", ("outcome",))
        self.live_leases = gauge("live_leases", "Leases held now")
        self.credits = gauge("credits", "Sum of all credits, in verified tokens")

    def render(self, summary: Summary) -> bytes:
        """The exposition text, with the gauges set from `summary`."""
        self.head_version.set(-1 if summary.head_version is None else summary.head_version)
        self.live_leases.set(summary.live_leases)
        self.credits.set(summary.credits)
        for gauge, values in (
            (self.rollouts, summary.rollouts),
            (self.rejections, summary.rejections),
            (self.drops, summary.drops),
        ):
            gauge.clear()
            for label, count in values.items():
                gauge.labels(label).set(count)
        self.workers.labels("active").set(summary.workers_active)
        self.workers.labels("banned").set(summary.workers_banned)
        for state in ("admitted", "shadow", "refused"):
            self.hardware.labels(state).set(sum(line.state == state for line in summary.hardware))
        self.shadow.labels("accepted").set(sum(line.accepted for line in summary.hardware))
        self.shadow.labels("rejected").set(sum(line.rejected for line in summary.hardware))
        return generate_latest(self.registry)
