"""The worker: leases samples, generates them with the current policy, proves it, submits."""
