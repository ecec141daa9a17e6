from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRefusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOIN_REFUSAL_NONE: _ClassVar[JoinRefusal]
    JOIN_REFUSAL_WRONG_RUN: _ClassVar[JoinRefusal]
    JOIN_REFUSAL_WRONG_SIGNATURE: _ClassVar[JoinRefusal]
    JOIN_REFUSAL_NAME_TAKEN: _ClassVar[JoinRefusal]
    JOIN_REFUSAL_FULL: _ClassVar[JoinRefusal]
    JOIN_REFUSAL_MALFORMED: _ClassVar[JoinRefusal]
    JOIN_REFUSAL_UNAUTHENTICATED: _ClassVar[JoinRefusal]
    JOIN_REFUSAL_WRONG_IDENTITY: _ClassVar[JoinRefusal]
JOIN_REFUSAL_NONE: JoinRefusal
JOIN_REFUSAL_WRONG_RUN: JoinRefusal
JOIN_REFUSAL_WRONG_SIGNATURE: JoinRefusal
JOIN_REFUSAL_NAME_TAKEN: JoinRefusal
JOIN_REFUSAL_FULL: JoinRefusal
JOIN_REFUSAL_MALFORMED: JoinRefusal
JOIN_REFUSAL_UNAUTHENTICATED: JoinRefusal
JOIN_REFUSAL_WRONG_IDENTITY: JoinRefusal

class Member(_message.Message):
    __slots__ = ("name", "address", "metrics_address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    metrics_address: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class Members(_message.Message):
    __slots__ = ("version", "from_round", "members")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FROM_ROUND_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    from_round: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, version: _Optional[int] = ..., from_round: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class RunDescription(_message.Message):
    __slots__ = ("run", "seed", "topology", "degree", "fresh", "started", "first_round")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    DEGREE_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROUND_FIELD_NUMBER: _ClassVar[int]
    run: str
    seed: int
    topology: str
    degree: int
    fresh: bool
    started: bool
    first_round: int
    def __init__(self, run: _Optional[str] = ..., seed: _Optional[int] = ..., topology: _Optional[str] = ..., degree: _Optional[int] = ..., fresh: _Optional[bool] = ..., started: _Optional[bool] = ..., first_round: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("run", "member", "signature", "round", "version", "held")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    run: str
    member: Member
    signature: str
    round: int
    version: int
    held: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[str] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., signature: _Optional[str] = ..., round: _Optional[int] = ..., version: _Optional[int] = ..., held: _Optional[_Iterable[int]] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("refusal", "detail", "run", "members", "lease_seconds", "round", "before")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    refusal: JoinRefusal
    detail: str
    run: RunDescription
    members: Members
    lease_seconds: float
    round: int
    before: _containers.RepeatedCompositeFieldContainer[Members]
    def __init__(self, refusal: _Optional[_Union[JoinRefusal, str]] = ..., detail: _Optional[str] = ..., run: _Optional[_Union[RunDescription, _Mapping]] = ..., members: _Optional[_Union[Members, _Mapping]] = ..., lease_seconds: _Optional[float] = ..., round: _Optional[int] = ..., before: _Optional[_Iterable[_Union[Members, _Mapping]]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("run", "name", "address", "round", "version")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    address: str
    round: int
    version: int
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., round: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("known", "started", "members", "before", "round")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    known: bool
    started: bool
    members: Members
    before: _containers.RepeatedCompositeFieldContainer[Members]
    round: int
    def __init__(self, known: _Optional[bool] = ..., started: _Optional[bool] = ..., members: _Optional[_Union[Members, _Mapping]] = ..., before: _Optional[_Iterable[_Union[Members, _Mapping]]] = ..., round: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("run", "name", "address", "round")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    address: str
    round: int
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("run", "members")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    run: RunDescription
    members: Members
    def __init__(self, run: _Optional[_Union[RunDescription, _Mapping]] = ..., members: _Optional[_Union[Members, _Mapping]] = ...) -> None: ...
