"""How fast weights reach every worker, ours beside the published `shardcast` package. See `__main__`."""
