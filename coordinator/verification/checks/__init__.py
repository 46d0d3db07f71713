"""The checks, one class each, and the order in which they run: cheap before dear.

FormCheck           no model   sizes, vocabulary, spans, proofs' form, log-probs, segments
TerminationCheck    no model   EOS last and only last, or the length limit
EosCheck            prefill    the EOS that ends it is plausible
ProofCheck          prefill    activations match the proofs
LogprobCheck        prefill    claimed log-probabilities match
SeedCheck           prefill    the issued seed selects these tokens
"""

from coordinator.verification.checks.base import Check, CheckResult, Claim
from coordinator.verification.checks.form import FormCheck
from coordinator.verification.checks.logprob import LogprobCheck
from coordinator.verification.checks.proof import ProofCheck
from coordinator.verification.checks.run import run_checks
from coordinator.verification.checks.seed import SeedCheck
from coordinator.verification.checks.termination import EosCheck, TerminationCheck

__all__ = [
    "Check",
    "CheckResult",
    "Claim",
    "EosCheck",
    "FormCheck",
    "LogprobCheck",
    "ProofCheck",
    "SeedCheck",
    "TerminationCheck",
    "run_checks",
]
