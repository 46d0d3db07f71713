"""Tasks and how they are scored. Scoring happens on the coordinator's side only, in an unprivileged process."""
