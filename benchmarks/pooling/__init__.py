"""Power and false alarms of the tests over many rollouts: `python -m benchmarks.pooling`.

attacks     weights as a cheat would run them
engine      honest and cheating workers: seeded generation with a KV cache, proofs and log-probs as a worker builds them
measure     claims through the verifier's prefill and checks; the statistics that the tests take
simulate    workers drawn from measured rollouts: how long until an alarm
"""
