"""How many rollouts a coordinator takes in, beside a bare gRPC server that only echoes the same bytes.

setting    the folder, run file and keys of a run without a model
manifests  versions as the simulated trainer announces them
load       simulated workers: signed submissions through a few channels, closed loop or open
clients    a process of such workers, told what to do by lines of JSON
echo       the ceiling: the same calls and bytes, the same signature check, nothing stored
recorded   a verifier whose verdicts are recorded ones: the product's own claims and transactions, no prefill
trainer    a simulated trainer: pulls, reports, acknowledges, announces
watch      CPU, memory and size of the database while all of this runs
"""
