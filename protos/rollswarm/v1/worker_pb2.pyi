from protos.rollswarm.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetChallengeRequest(_message.Message):
    __slots__ = ("key_id", "protocol_min", "protocol_max")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    protocol_min: int
    protocol_max: int
    def __init__(self, key_id: _Optional[str] = ..., protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ...) -> None: ...

class GetChallengeResponse(_message.Message):
    __slots__ = ("challenge",)
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    challenge: bytes
    def __init__(self, challenge: _Optional[bytes] = ...) -> None: ...

class Declaration(_message.Message):
    __slots__ = ("challenge", "precision", "hardware")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    challenge: bytes
    precision: str
    hardware: str
    def __init__(self, challenge: _Optional[bytes] = ..., precision: _Optional[str] = ..., hardware: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("challenge", "name", "hardware", "software", "invite", "work_nonce", "declaration")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    INVITE_FIELD_NUMBER: _ClassVar[int]
    WORK_NONCE_FIELD_NUMBER: _ClassVar[int]
    DECLARATION_FIELD_NUMBER: _ClassVar[int]
    challenge: _common_pb2.SignedEnvelope
    name: str
    hardware: str
    software: str
    invite: str
    work_nonce: int
    declaration: _common_pb2.SignedEnvelope
    def __init__(self, challenge: _Optional[_Union[_common_pb2.SignedEnvelope, _Mapping]] = ..., name: _Optional[str] = ..., hardware: _Optional[str] = ..., software: _Optional[str] = ..., invite: _Optional[str] = ..., work_nonce: _Optional[int] = ..., declaration: _Optional[_Union[_common_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("token", "token_lifetime_s", "run_id", "notice")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LIFETIME_S_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    token: str
    token_lifetime_s: int
    run_id: str
    notice: str
    def __init__(self, token: _Optional[str] = ..., token_lifetime_s: _Optional[int] = ..., run_id: _Optional[str] = ..., notice: _Optional[str] = ...) -> None: ...

class AcquireLeasesRequest(_message.Message):
    __slots__ = ("max_leases", "policy_version", "wait_ms")
    MAX_LEASES_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    max_leases: int
    policy_version: int
    wait_ms: int
    def __init__(self, max_leases: _Optional[int] = ..., policy_version: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class AcquireLeasesResponse(_message.Message):
    __slots__ = ("leases", "head_version", "reason")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    HEAD_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    head_version: int
    reason: str
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., head_version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "sample_id", "prompt_token_ids", "sampling", "seed", "min_version", "deadline_ms", "turns")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    sample_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    seed: int
    min_version: int
    deadline_ms: int
    turns: str
    def __init__(self, lease_id: _Optional[str] = ..., sample_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ..., min_version: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., turns: _Optional[str] = ...) -> None: ...

class LeaseProgress(_message.Message):
    __slots__ = ("lease_id", "length", "token_digest", "policy_version", "signature")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    length: int
    token_digest: bytes
    policy_version: int
    signature: bytes
    def __init__(self, lease_id: _Optional[str] = ..., length: _Optional[int] = ..., token_digest: _Optional[bytes] = ..., policy_version: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("progress",)
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    progress: _containers.RepeatedCompositeFieldContainer[LeaseProgress]
    def __init__(self, progress: _Optional[_Iterable[_Union[LeaseProgress, _Mapping]]] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("renewals", "head_version")
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    HEAD_VERSION_FIELD_NUMBER: _ClassVar[int]
    renewals: _containers.RepeatedCompositeFieldContainer[LeaseRenewal]
    head_version: int
    def __init__(self, renewals: _Optional[_Iterable[_Union[LeaseRenewal, _Mapping]]] = ..., head_version: _Optional[int] = ...) -> None: ...

class LeaseRenewal(_message.Message):
    __slots__ = ("lease_id", "live", "deadline_ms", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    live: bool
    deadline_ms: int
    reason: str
    def __init__(self, lease_id: _Optional[str] = ..., live: _Optional[bool] = ..., deadline_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ReturnLeasesRequest(_message.Message):
    __slots__ = ("lease_ids", "reason")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class ReturnLeasesResponse(_message.Message):
    __slots__ = ("returned",)
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    returned: int
    def __init__(self, returned: _Optional[int] = ...) -> None: ...

class RolloutPayload(_message.Message):
    __slots__ = ("run_id", "lease_id", "sample_id", "segments", "logprobs", "spans", "proofs", "stop_reason", "precision", "turns")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    PROOFS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    lease_id: str
    sample_id: str
    segments: _containers.RepeatedCompositeFieldContainer[_common_pb2.Segment]
    logprobs: bytes
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.VersionSpan]
    proofs: _containers.RepeatedCompositeFieldContainer[SpanProofs]
    stop_reason: _common_pb2.StopReason
    precision: str
    turns: str
    def __init__(self, run_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., sample_id: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[_common_pb2.Segment, _Mapping]]] = ..., logprobs: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.VersionSpan, _Mapping]]] = ..., proofs: _Optional[_Iterable[_Union[SpanProofs, _Mapping]]] = ..., stop_reason: _Optional[_Union[_common_pb2.StopReason, str]] = ..., precision: _Optional[str] = ..., turns: _Optional[str] = ...) -> None: ...

class SpanProofs(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, chunks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SubmitRolloutRequest(_message.Message):
    __slots__ = ("rollout",)
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    rollout: _common_pb2.SignedEnvelope
    def __init__(self, rollout: _Optional[_Union[_common_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class SubmitRolloutResponse(_message.Message):
    __slots__ = ("receipt",)
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    receipt: _common_pb2.SignedEnvelope
    def __init__(self, receipt: _Optional[_Union[_common_pb2.SignedEnvelope, _Mapping]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("run_id", "rollout_id", "sample_id", "received_at_ms")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    rollout_id: str
    sample_id: str
    received_at_ms: int
    def __init__(self, run_id: _Optional[str] = ..., rollout_id: _Optional[str] = ..., sample_id: _Optional[str] = ..., received_at_ms: _Optional[int] = ...) -> None: ...

class GetStandingRequest(_message.Message):
    __slots__ = ("max_verdicts",)
    MAX_VERDICTS_FIELD_NUMBER: _ClassVar[int]
    max_verdicts: int
    def __init__(self, max_verdicts: _Optional[int] = ...) -> None: ...

class GetStandingResponse(_message.Message):
    __slots__ = ("credits", "strikes", "banned", "ban_reason", "accepted", "rejected", "pending", "verdicts")
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    STRIKES_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    BAN_REASON_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    credits: int
    strikes: int
    banned: bool
    ban_reason: str
    accepted: int
    rejected: int
    pending: int
    verdicts: _containers.RepeatedCompositeFieldContainer[VerdictNotice]
    def __init__(self, credits: _Optional[int] = ..., strikes: _Optional[int] = ..., banned: _Optional[bool] = ..., ban_reason: _Optional[str] = ..., accepted: _Optional[int] = ..., rejected: _Optional[int] = ..., pending: _Optional[int] = ..., verdicts: _Optional[_Iterable[_Union[VerdictNotice, _Mapping]]] = ...) -> None: ...

class VerdictNotice(_message.Message):
    __slots__ = ("rollout_id", "outcome", "reason", "detail", "measurements")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MEASUREMENTS_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    outcome: str
    reason: str
    detail: str
    measurements: _containers.RepeatedCompositeFieldContainer[Measurement]
    def __init__(self, rollout_id: _Optional[str] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., measurements: _Optional[_Iterable[_Union[Measurement, _Mapping]]] = ...) -> None: ...

class Measurement(_message.Message):
    __slots__ = ("name", "value", "admitted", "at_least")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    admitted: float
    at_least: bool
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ..., admitted: _Optional[float] = ..., at_least: _Optional[bool] = ...) -> None: ...
