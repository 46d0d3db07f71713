"""What a submission passes through: the door's pure parts, then the verifier's, with the real model of each version."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from coordinator.admission import Limits, Refused, admit
from coordinator.verification.checks import Claim, run_checks
from coordinator.verification.resident import ResidentModels, prefill_rollouts
from protocol.errors import WorkerFault
from protocol.rollout import Outcome, Rollout, Verdict
from protocol.signing import ROLLOUT, open_envelope
from protocol.wire import envelope_from_wire, rollout_from_payload
from protos.rollswarm.v1 import worker_pb2
from tests.adversary.fuzz.corpus import Corpus
from tests.thresholds import BY_HAND
from tests.tiny_model import HIDDEN_SIZE, VOCABULARY
from tests.unit.coordinator.verification.claims import RUN_ID, to_prefill

MAX_PAYLOAD_BYTES = 1 << 18
_LIMITS = Limits(RUN_ID, VOCABULARY, HIDDEN_SIZE, max_staleness=2)


class Line:
    """All leases of the corpus are live, and none is answered yet."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._samples = {sample.lease.lease_id: sample for sample in corpus.samples}
        self._models = ResidentModels(corpus.folders.__getitem__, max_resident=len(corpus.folders))

    def receive(self, data: bytes) -> Rollout | str:
        """The rollout that the door lets in, or why it doesn't."""
        try:
            request = worker_pb2.SubmitRolloutRequest.FromString(data)
        except DecodeError:
            return "unreadable"
        try:
            payload = open_envelope(envelope_from_wire(request.rollout), ROLLOUT, pinned=(self._corpus.worker.key_id,))
            if len(payload) > MAX_PAYLOAD_BYTES:
                return "form"
            rollout = rollout_from_payload(payload)
        except WorkerFault as fault:
            return str(fault.reason)
        decision = self._admit(rollout)
        return decision.reason.value if isinstance(decision, Refused) else rollout

    def _admit(self, rollout: Rollout) -> object:
        sample = self._samples.get(rollout.lease_id)
        return admit(
            rollout,
            worker_id=self._corpus.worker.key_id,
            lease=sample.lease if sample else None,
            sampling=sample.request.sampling if sample else None,
            versions=self._corpus.versions,
            head=max(self._corpus.versions),
            now=50.0,
            limits=_LIMITS,
        )

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """A verdict each, of rollouts that the door let in."""
        claims = [self._claim(rollout) for rollout in rollouts]
        verdicts = {n: run_checks(claim, None, BY_HAND) for n, claim in enumerate(claims)}
        passed = [n for n, verdict in verdicts.items() if verdict.outcome is Outcome.ACCEPTED]
        found = prefill_rollouts([to_prefill(claims[n], n) for n in passed], self._models)
        verdicts |= {n: run_checks(claims[n], found[n], BY_HAND) for n in passed}
        return [verdicts[n] for n in range(len(rollouts))]

    def _claim(self, rollout: Rollout) -> Claim:
        request = self._samples[rollout.lease_id].request
        return Claim(rollout, request.prompt_token_ids, request.sampling, request.seed, VOCABULARY, HIDDEN_SIZE)

    def honest(self, rollout: Rollout) -> Rollout:
        """What an honest worker would have answered to the lease that this rollout names."""
        return self._samples[rollout.lease_id].rollout
