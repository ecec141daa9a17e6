from spark_node.generated.spark.v1 import package_pb2 as _package_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_NONE: _ClassVar[Reason]
    REASON_MALFORMED: _ClassVar[Reason]
    REASON_TOO_LARGE: _ClassVar[Reason]
    REASON_CHECKSUM: _ClassVar[Reason]
    REASON_UNSUPPORTED_FORMAT: _ClassVar[Reason]
    REASON_WRONG_RUN: _ClassVar[Reason]
    REASON_WRONG_ROUND: _ClassVar[Reason]
    REASON_WRONG_SENDER: _ClassVar[Reason]
    REASON_WRONG_KIND: _ClassVar[Reason]
    REASON_WRONG_SIGNATURE: _ClassVar[Reason]
    REASON_WRONG_SPECIFICATION: _ClassVar[Reason]
    REASON_NOT_FINITE: _ClassVar[Reason]
    REASON_MISSING_FACTOR: _ClassVar[Reason]
    REASON_STALE: _ClassVar[Reason]
    REASON_EARLY: _ClassVar[Reason]
    REASON_NOT_A_NEIGHBOUR: _ClassVar[Reason]
    REASON_DUPLICATE: _ClassVar[Reason]
    REASON_UNAUTHENTICATED: _ClassVar[Reason]
    REASON_BUSY: _ClassVar[Reason]
    REASON_LATE: _ClassVar[Reason]
    REASON_CUT_OFF: _ClassVar[Reason]
    REASON_TOO_FAST: _ClassVar[Reason]
    REASON_REVOKED: _ClassVar[Reason]
    REASON_EXPIRED: _ClassVar[Reason]
    REASON_WRONG_ROLE: _ClassVar[Reason]
    REASON_WRONG_STAGE: _ClassVar[Reason]
    REASON_SILENT: _ClassVar[Reason]
REASON_NONE: Reason
REASON_MALFORMED: Reason
REASON_TOO_LARGE: Reason
REASON_CHECKSUM: Reason
REASON_UNSUPPORTED_FORMAT: Reason
REASON_WRONG_RUN: Reason
REASON_WRONG_ROUND: Reason
REASON_WRONG_SENDER: Reason
REASON_WRONG_KIND: Reason
REASON_WRONG_SIGNATURE: Reason
REASON_WRONG_SPECIFICATION: Reason
REASON_NOT_FINITE: Reason
REASON_MISSING_FACTOR: Reason
REASON_STALE: Reason
REASON_EARLY: Reason
REASON_NOT_A_NEIGHBOUR: Reason
REASON_DUPLICATE: Reason
REASON_UNAUTHENTICATED: Reason
REASON_BUSY: Reason
REASON_LATE: Reason
REASON_CUT_OFF: Reason
REASON_TOO_FAST: Reason
REASON_REVOKED: Reason
REASON_EXPIRED: Reason
REASON_WRONG_ROLE: Reason
REASON_WRONG_STAGE: Reason
REASON_SILENT: Reason

class Envelope(_message.Message):
    __slots__ = ("run", "round", "stage", "sender", "members_version")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_VERSION_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    stage: str
    sender: str
    members_version: int
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., stage: _Optional[str] = ..., sender: _Optional[str] = ..., members_version: _Optional[int] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("envelope", "chunk")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    envelope: Envelope
    chunk: _package_pb2.Chunk
    def __init__(self, envelope: _Optional[_Union[Envelope, _Mapping]] = ..., chunk: _Optional[_Union[_package_pb2.Chunk, _Mapping]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("reason", "detail", "round", "missing")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    reason: Reason
    detail: str
    round: int
    missing: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, reason: _Optional[_Union[Reason, str]] = ..., detail: _Optional[str] = ..., round: _Optional[int] = ..., missing: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StandingRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ModelRequest(_message.Message):
    __slots__ = ("run", "round", "member")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    member: str
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., member: _Optional[str] = ...) -> None: ...

class ModelReply(_message.Message):
    __slots__ = ("found", "chunk")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    found: bool
    chunk: _package_pb2.Chunk
    def __init__(self, found: _Optional[bool] = ..., chunk: _Optional[_Union[_package_pb2.Chunk, _Mapping]] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("run", "after_round")
    RUN_FIELD_NUMBER: _ClassVar[int]
    AFTER_ROUND_FIELD_NUMBER: _ClassVar[int]
    run: str
    after_round: int
    def __init__(self, run: _Optional[str] = ..., after_round: _Optional[int] = ...) -> None: ...

class EdgeBytes(_message.Message):
    __slots__ = ("peer", "kind", "sent", "raw", "messages")
    PEER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    peer: str
    kind: str
    sent: int
    raw: int
    messages: int
    def __init__(self, peer: _Optional[str] = ..., kind: _Optional[str] = ..., sent: _Optional[int] = ..., raw: _Optional[int] = ..., messages: _Optional[int] = ...) -> None: ...

class RoundReport(_message.Message):
    __slots__ = ("round", "expected", "used", "seconds", "stage_seconds", "facts", "bytes", "refused", "finished")
    class StageSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    round: int
    expected: int
    used: int
    seconds: float
    stage_seconds: _containers.ScalarMap[str, float]
    facts: _containers.ScalarMap[str, float]
    bytes: _containers.RepeatedCompositeFieldContainer[EdgeBytes]
    refused: _containers.ScalarMap[str, int]
    finished: float
    def __init__(self, round: _Optional[int] = ..., expected: _Optional[int] = ..., used: _Optional[int] = ..., seconds: _Optional[float] = ..., stage_seconds: _Optional[_Mapping[str, float]] = ..., facts: _Optional[_Mapping[str, float]] = ..., bytes: _Optional[_Iterable[_Union[EdgeBytes, _Mapping]]] = ..., refused: _Optional[_Mapping[str, int]] = ..., finished: _Optional[float] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("name", "state", "round", "rounds", "control_bytes", "resident_bytes", "pss_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    round: int
    rounds: _containers.RepeatedCompositeFieldContainer[RoundReport]
    control_bytes: int
    resident_bytes: int
    pss_bytes: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., round: _Optional[int] = ..., rounds: _Optional[_Iterable[_Union[RoundReport, _Mapping]]] = ..., control_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., pss_bytes: _Optional[int] = ...) -> None: ...
