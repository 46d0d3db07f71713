"""The staleness laboratory: the same tiny training under every objective and a controlled lag."""
