"""Verification: prefill a claimed rollout under the exact versions, and check what the worker says against it.

replay      which token the issued seed selects, for many positions at once
weights     reading a version's folder, and a module to put it into
prefill     one version's model: hidden states, log-probs, entropies, seed margins
resident    which versions are in memory; rollouts whose tokens come from several versions
thresholds  what an honest run may differ by, as measured
fields      dataclasses of numbers from TOML or JSON, checked field by field
pooled      which tests run over all of a worker's rollouts, and their bounds
pooling     how: testing by betting, and what it promises
comparison  what a complete group says about the workers that wrote it
checks/     one class per check, and the order in which they run
judge       a batch of claimed rollouts in, a verdict each out; the second look in float32
process     `coordinator verify`: claims rollouts, has them judged, writes the verdicts
"""
