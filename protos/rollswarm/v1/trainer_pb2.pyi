from protos.rollswarm.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WithdrawVersionsRequest(_message.Message):
    __slots__ = ("kept_version",)
    KEPT_VERSION_FIELD_NUMBER: _ClassVar[int]
    kept_version: int
    def __init__(self, kept_version: _Optional[int] = ...) -> None: ...

class WithdrawVersionsResponse(_message.Message):
    __slots__ = ("next_version", "next_batch", "withdrawn", "purged")
    NEXT_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_BATCH_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    PURGED_FIELD_NUMBER: _ClassVar[int]
    next_version: int
    next_batch: int
    withdrawn: int
    purged: int
    def __init__(self, next_version: _Optional[int] = ..., next_batch: _Optional[int] = ..., withdrawn: _Optional[int] = ..., purged: _Optional[int] = ...) -> None: ...

class GetRunStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRunStateResponse(_message.Message):
    __slots__ = ("run_id", "head_version", "head_digest", "next_batch", "temperature", "max_staleness", "groups_per_batch")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HEAD_VERSION_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NEXT_BATCH_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_BATCH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    head_version: int
    head_digest: str
    next_batch: int
    temperature: float
    max_staleness: int
    groups_per_batch: int
    def __init__(self, run_id: _Optional[str] = ..., head_version: _Optional[int] = ..., head_digest: _Optional[str] = ..., next_batch: _Optional[int] = ..., temperature: _Optional[float] = ..., max_staleness: _Optional[int] = ..., groups_per_batch: _Optional[int] = ...) -> None: ...

class AnnounceVersionRequest(_message.Message):
    __slots__ = ("manifest", "key_rotations")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    KEY_ROTATIONS_FIELD_NUMBER: _ClassVar[int]
    manifest: _common_pb2.SignedEnvelope
    key_rotations: _containers.RepeatedCompositeFieldContainer[_common_pb2.SignedEnvelope]
    def __init__(self, manifest: _Optional[_Union[_common_pb2.SignedEnvelope, _Mapping]] = ..., key_rotations: _Optional[_Iterable[_Union[_common_pb2.SignedEnvelope, _Mapping]]] = ...) -> None: ...

class AnnounceVersionResponse(_message.Message):
    __slots__ = ("head_version",)
    HEAD_VERSION_FIELD_NUMBER: _ClassVar[int]
    head_version: int
    def __init__(self, head_version: _Optional[int] = ...) -> None: ...

class PullGroupsRequest(_message.Message):
    __slots__ = ("batch", "trainer_version", "held_group_ids", "max_groups", "wait_ms")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    TRAINER_VERSION_FIELD_NUMBER: _ClassVar[int]
    HELD_GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_GROUPS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    batch: int
    trainer_version: int
    held_group_ids: _containers.RepeatedScalarFieldContainer[str]
    max_groups: int
    wait_ms: int
    def __init__(self, batch: _Optional[int] = ..., trainer_version: _Optional[int] = ..., held_group_ids: _Optional[_Iterable[str]] = ..., max_groups: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class PullGroupsResponse(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[RolloutGroup]
    def __init__(self, groups: _Optional[_Iterable[_Union[RolloutGroup, _Mapping]]] = ...) -> None: ...

class RolloutGroup(_message.Message):
    __slots__ = ("group_id", "task_id", "environment", "prompt_token_ids", "n_requested", "rollouts")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    N_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    task_id: str
    environment: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    n_requested: int
    rollouts: _containers.RepeatedCompositeFieldContainer[VerifiedRollout]
    def __init__(self, group_id: _Optional[str] = ..., task_id: _Optional[str] = ..., environment: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., n_requested: _Optional[int] = ..., rollouts: _Optional[_Iterable[_Union[VerifiedRollout, _Mapping]]] = ...) -> None: ...

class VerifiedRollout(_message.Message):
    __slots__ = ("rollout_id", "sample_id", "worker_id", "segments", "spans", "behaviour_logprobs", "old_logprobs", "reward", "audited", "stop_reason")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OLD_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    sample_id: str
    worker_id: str
    segments: _containers.RepeatedCompositeFieldContainer[_common_pb2.Segment]
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.VersionSpan]
    behaviour_logprobs: bytes
    old_logprobs: bytes
    reward: float
    audited: bool
    stop_reason: _common_pb2.StopReason
    def __init__(self, rollout_id: _Optional[str] = ..., sample_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[_common_pb2.Segment, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.VersionSpan, _Mapping]]] = ..., behaviour_logprobs: _Optional[bytes] = ..., old_logprobs: _Optional[bytes] = ..., reward: _Optional[float] = ..., audited: _Optional[bool] = ..., stop_reason: _Optional[_Union[_common_pb2.StopReason, str]] = ...) -> None: ...

class AcknowledgeBatchesRequest(_message.Message):
    __slots__ = ("through_batch",)
    THROUGH_BATCH_FIELD_NUMBER: _ClassVar[int]
    through_batch: int
    def __init__(self, through_batch: _Optional[int] = ...) -> None: ...

class AcknowledgeBatchesResponse(_message.Message):
    __slots__ = ("acknowledged",)
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    acknowledged: int
    def __init__(self, acknowledged: _Optional[int] = ...) -> None: ...

class ReportStepRequest(_message.Message):
    __slots__ = ("batch", "trainer_version", "optimizer_steps", "metrics", "dropped", "trained_rollout_ids", "alarms")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class AlarmsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BATCH_FIELD_NUMBER: _ClassVar[int]
    TRAINER_VERSION_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEPS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_ROLLOUT_IDS_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    batch: int
    trainer_version: int
    optimizer_steps: int
    metrics: _containers.ScalarMap[str, float]
    dropped: _containers.ScalarMap[str, int]
    trained_rollout_ids: _containers.RepeatedScalarFieldContainer[str]
    alarms: _containers.ScalarMap[str, str]
    def __init__(self, batch: _Optional[int] = ..., trainer_version: _Optional[int] = ..., optimizer_steps: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., dropped: _Optional[_Mapping[str, int]] = ..., trained_rollout_ids: _Optional[_Iterable[str]] = ..., alarms: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ReportStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
