"""What asynchrony buys: the same training strictly synchronous, k steps off, and fully asynchronous."""
