"""`python -m tests.soak --minutes 45`: a whole network under restarts, and what it leaves behind."""
