"""What every role must agree on: values and rules. No I/O, no clock, no randomness, no torch at import."""
