"""The coordinator: leases samples, receives rollouts, has them verified, feeds the trainer."""
