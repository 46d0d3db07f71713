"""The HTTP side: run terms, status page, JSON API, metrics, health."""
