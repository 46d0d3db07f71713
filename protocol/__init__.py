"""What every role must agree on: values and rules. No clock, no torch at import; I/O and randomness only in
`keyfile` (key files) and `cli` (logs, errors, exit statuses).
"""
