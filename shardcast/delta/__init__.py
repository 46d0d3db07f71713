"""Deltas: a version as the bit-exact difference to an earlier one. `docs/protocol.md` has the layout."""
