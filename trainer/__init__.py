"""The trainer: pulls verified rollouts, learns from them, publishes new policy versions."""
