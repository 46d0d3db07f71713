"""What proofs and seeds cost a worker, and what checking them costs a verifier.

throughput   our engine (proofs captured, seeded choice) beside plain vLLM on the same requests, paired and alternating
proofs       building and checking activation proofs, per token and per chunk
prefill      the verifier beside a bare transformers prefill with LM head, and beside vLLM's generation, by length
"""
