"""Thresholds measured: honest rollouts of a run's own model, and how far from our prefill they may be."""
