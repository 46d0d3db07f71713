"""A small run of the fuzz; `python -m tests.adversary.fuzz --count 100000` is the same at length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.rollout import Outcome, Segment, StopReason, Verdict
from protocol.signing import ROLLOUT
from protocol.wire import envelope_to_wire
from protos.rollswarm.v1 import worker_pb2
from tests.adversary.fuzz.corpus import Corpus, Sample, build_corpus
from tests.adversary.fuzz.line import Line
from tests.adversary.fuzz.run import Fuzz, accepted_as

COUNT = 2_000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build_corpus(tmp_path_factory.mktemp("corpus"), per_kind=4)


def submission(corpus: Corpus, sample: Sample) -> bytes:
    envelope = corpus.worker.sign(ROLLOUT, sample.payload)
    return worker_pb2.SubmitRolloutRequest(rollout=envelope_to_wire(envelope)).SerializeToString()


def test_what_is_not_mutated_is_accepted(corpus: Corpus) -> None:
    line = Line(corpus)
    received = [line.receive(submission(corpus, sample)) for sample in corpus.samples]
    assert received == [sample.rollout for sample in corpus.samples]
    verdicts = line.verify([sample.rollout for sample in corpus.samples])
    assert {verdict.outcome for verdict in verdicts} == {Outcome.ACCEPTED}
    assert any(len(sample.rollout.spans) == 2 for sample in corpus.samples)


def test_no_mutation_crashes_anything_or_is_accepted_as_something_else(corpus: Corpus) -> None:
    report = Fuzz(corpus, seed=1).run(0, COUNT)
    assert (report.crashes, report.frauds) == ([], [])
    assert report.outcomes.total() == COUNT
    for reached in ("unreadable", "signature", "form", "lease", "commitment", "version"):
        assert report.outcomes[f"refused: {reached}"] > 0, reached
    for reached in ("termination", "proof", "logprob"):
        assert report.outcomes[f"rejected: {reached}"] > 0, reached


def test_the_same_seed_gives_the_same_outcomes(corpus: Corpus) -> None:
    assert Fuzz(corpus, seed=2).run(0, 100).outcomes == Fuzz(corpus, seed=2).run(0, 100).outcomes


def test_what_counts_as_fraud(corpus: Corpus) -> None:
    honest = max((sample.rollout for sample in corpus.samples), key=lambda rollout: len(rollout.token_ids))
    passed = Verdict(Outcome.ACCEPTED, metrics={"seed_margin_max": 0.2})
    exact = Verdict(Outcome.ACCEPTED, metrics={"seed_margin_max": 0.0})
    last = (*honest.token_ids[:-1], honest.token_ids[-1] ^ 1)
    first = (honest.token_ids[0] ^ 1, *honest.token_ids[1:])
    assert accepted_as(honest, honest, exact) == "same"
    assert accepted_as(replace(honest, logprobs=(-1.0,) * len(last)), honest, exact) == "other log-probs"
    assert accepted_as(replace(honest, proofs=()), honest, exact) == "other proofs"
    assert accepted_as(replace(honest, segments=(Segment.by_model(last),)), honest, passed).startswith("near tie")
    for fraud in (
        replace(honest, segments=(Segment.by_model(first),)),
        replace(honest, segments=(Segment.by_model(last[:-1]),)),
        replace(honest, spans=honest.spans[:-1]),
        replace(honest, stop_reason=StopReason.EOS if honest.stop_reason is StopReason.LENGTH else StopReason.LENGTH),
        replace(honest, lease_id="other"),
        replace(honest, sample_id="other"),
    ):
        assert accepted_as(fraud, honest, passed) == "FRAUD"
    assert accepted_as(replace(honest, segments=(Segment.by_model(last),)), honest, exact) == "FRAUD"


@pytest.mark.full
def test_twenty_thousand_more(corpus: Corpus) -> None:
    report = Fuzz(corpus, seed=3).run(0, 20_000)
    assert (report.crashes, report.frauds) == ([], [])
