from __future__ import annotations

from protos.rollswarm.v1 import worker_pb2
from worker.verdict import verdict_line


def test_an_acceptance_is_short() -> None:
    notice = worker_pb2.VerdictNotice(rollout_id="sha256:" + "c" * 64, outcome="accepted")
    notice.measurements.append(worker_pb2.Measurement(name="seed_margin_max", value=0.1, admitted=0.6))
    assert verdict_line(notice) == "cccccccccccc  accepted"


def test_a_least_bound_is_said_as_one() -> None:
    least = worker_pb2.Measurement(name="eos_logprob", value=-25.0, admitted=-20.72, at_least=True)
    notice = worker_pb2.VerdictNotice(outcome="rejected", reason="termination", detail="no EOS", measurements=[least])
    assert verdict_line(notice).endswith("(termination: no EOS); measured: eos_logprob -25 (at least -20.7)")
