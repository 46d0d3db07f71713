"""The worker's vLLM engine. The modules here are the only importers of vllm, and vLLM's subprocesses import them.

engine.py         VllmEngine: the contract of worker/engine.py on vLLM's AsyncLLM       (in the worker's process)
reload.py         which checkpoints may be loaded in place of another                   (in the worker's process)
context.py        how long a sequence may be with this model                            (in the worker's process)
installed.py      whether vLLM is here at all, without importing it                     (in the worker's process)
engine_log.py     the engine's own words, for errors                                    (in the worker's process)
scratch.py        a temporary folder for the engine's log and sockets                   (in the worker's process)
extension.py      CaptureExtension: what the engine asks of vLLM's worker by RPC        (in vLLM's process)
capture_store.py  hidden states and log-probs per request, paged                        (in vLLM's process)
capture_step.py   one sampling step as the hooks hand it to the store                   (in vLLM's process)
capture_v1.py     hooks of the V1 model runner (CPU, older GPU builds)                  (in vLLM's process)
capture_v2.py     hooks of the V2 model runner (the default on GPUs)                    (in vLLM's process)
noise_v1.py       the seeded choice, which the V1 runner does not make by itself        (in vLLM's process)
"""
