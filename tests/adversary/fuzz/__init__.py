"""Honest submissions with mutated bytes and fields, run through what the door and the verifier run.

corpus     honest samples, signed, under live leases
mutations  what is done to bytes and to fields
line       door → checks that need no model → prefill → all checks
run        many mutations, and what came of them
"""
