from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_WEIGHTS: _ClassVar[Kind]
    KIND_REQUEST: _ClassVar[Kind]
    KIND_PACKAGE: _ClassVar[Kind]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_WEIGHTS: _ClassVar[Role]
    ROLE_VELOCITY: _ClassVar[Role]
    ROLE_LABELS: _ClassVar[Role]
    ROLE_LOGITS: _ClassVar[Role]
    ROLE_INPUTS: _ClassVar[Role]
    ROLE_SLOPES: _ClassVar[Role]
    ROLE_SIGNALS: _ClassVar[Role]
    ROLE_WEIGHT_ABOVE: _ClassVar[Role]
    ROLE_DENSE: _ClassVar[Role]

class Form(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORM_UNSPECIFIED: _ClassVar[Form]
    FORM_FACTORED: _ClassVar[Form]
    FORM_DENSE: _ClassVar[Form]

class Signals(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SIGNALS_UNSPECIFIED: _ClassVar[Signals]
    SIGNALS_IDENTITY: _ClassVar[Signals]
    SIGNALS_CHAINED: _ClassVar[Signals]
    SIGNALS_EXPLICIT: _ClassVar[Signals]

class Coding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODING_UNSPECIFIED: _ClassVar[Coding]
    CODING_FLOAT32: _ClassVar[Coding]
    CODING_BFLOAT16: _ClassVar[Coding]
    CODING_INTEGER: _ClassVar[Coding]
    CODING_MASK: _ClassVar[Coding]
    CODING_PALETTE: _ClassVar[Coding]
    CODING_QUANTISED: _ClassVar[Coding]
    CODING_SPARSE: _ClassVar[Coding]
    CODING_ABOVE_ZERO: _ClassVar[Coding]

class Levels(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEVELS_UNSPECIFIED: _ClassVar[Levels]
    LEVELS_SYMMETRIC: _ClassVar[Levels]
    LEVELS_AFFINE: _ClassVar[Levels]

class Pattern(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PATTERN_UNSPECIFIED: _ClassVar[Pattern]
    PATTERN_BITMAP: _ClassVar[Pattern]
    PATTERN_GAPS: _ClassVar[Pattern]

class Layout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYOUT_UNSPECIFIED: _ClassVar[Layout]
    LAYOUT_PLAIN: _ClassVar[Layout]
    LAYOUT_PLANES: _ClassVar[Layout]
    LAYOUT_PACKED: _ClassVar[Layout]
KIND_UNSPECIFIED: Kind
KIND_WEIGHTS: Kind
KIND_REQUEST: Kind
KIND_PACKAGE: Kind
ROLE_UNSPECIFIED: Role
ROLE_WEIGHTS: Role
ROLE_VELOCITY: Role
ROLE_LABELS: Role
ROLE_LOGITS: Role
ROLE_INPUTS: Role
ROLE_SLOPES: Role
ROLE_SIGNALS: Role
ROLE_WEIGHT_ABOVE: Role
ROLE_DENSE: Role
FORM_UNSPECIFIED: Form
FORM_FACTORED: Form
FORM_DENSE: Form
SIGNALS_UNSPECIFIED: Signals
SIGNALS_IDENTITY: Signals
SIGNALS_CHAINED: Signals
SIGNALS_EXPLICIT: Signals
CODING_UNSPECIFIED: Coding
CODING_FLOAT32: Coding
CODING_BFLOAT16: Coding
CODING_INTEGER: Coding
CODING_MASK: Coding
CODING_PALETTE: Coding
CODING_QUANTISED: Coding
CODING_SPARSE: Coding
CODING_ABOVE_ZERO: Coding
LEVELS_UNSPECIFIED: Levels
LEVELS_SYMMETRIC: Levels
LEVELS_AFFINE: Levels
PATTERN_UNSPECIFIED: Pattern
PATTERN_BITMAP: Pattern
PATTERN_GAPS: Pattern
LAYOUT_UNSPECIFIED: Layout
LAYOUT_PLAIN: Layout
LAYOUT_PLANES: Layout
LAYOUT_PACKED: Layout

class Stream(_message.Message):
    __slots__ = ("layout", "zstd", "bytes", "planes")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ZSTD_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    layout: Layout
    zstd: bool
    bytes: int
    planes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layout: _Optional[_Union[Layout, str]] = ..., zstd: _Optional[bool] = ..., bytes: _Optional[int] = ..., planes: _Optional[_Iterable[int]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("role", "layer", "shape", "coding", "bits", "levels", "group", "pattern", "kept", "streams", "digest", "named")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODING_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    role: Role
    layer: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    coding: Coding
    bits: int
    levels: Levels
    group: int
    pattern: Pattern
    kept: int
    streams: _containers.RepeatedCompositeFieldContainer[Stream]
    digest: bytes
    named: bool
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., layer: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., coding: _Optional[_Union[Coding, str]] = ..., bits: _Optional[int] = ..., levels: _Optional[_Union[Levels, str]] = ..., group: _Optional[int] = ..., pattern: _Optional[_Union[Pattern, str]] = ..., kept: _Optional[int] = ..., streams: _Optional[_Iterable[_Union[Stream, _Mapping]]] = ..., digest: _Optional[bytes] = ..., named: _Optional[bool] = ...) -> None: ...

class Layer(_message.Message):
    __slots__ = ("name", "form", "signals", "positions", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    form: Form
    signals: Signals
    positions: int
    parameters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., form: _Optional[_Union[Form, str]] = ..., signals: _Optional[_Union[Signals, str]] = ..., positions: _Optional[int] = ..., parameters: _Optional[_Iterable[str]] = ...) -> None: ...

class Specification(_message.Message):
    __slots__ = ("projection", "sketch", "sketch_size", "fresh_sketch", "keep", "bits", "max_error", "rounding")
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    SKETCH_FIELD_NUMBER: _ClassVar[int]
    SKETCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    FRESH_SKETCH_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    MAX_ERROR_FIELD_NUMBER: _ClassVar[int]
    ROUNDING_FIELD_NUMBER: _ClassVar[int]
    projection: str
    sketch: str
    sketch_size: int
    fresh_sketch: bool
    keep: float
    bits: int
    max_error: float
    rounding: str
    def __init__(self, projection: _Optional[str] = ..., sketch: _Optional[str] = ..., sketch_size: _Optional[int] = ..., fresh_sketch: _Optional[bool] = ..., keep: _Optional[float] = ..., bits: _Optional[int] = ..., max_error: _Optional[float] = ..., rounding: _Optional[str] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("format", "kind", "run", "round", "sender", "signature", "samples", "classes", "specification", "layers", "blocks")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    SPECIFICATION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    format: int
    kind: Kind
    run: str
    round: int
    sender: str
    signature: str
    samples: int
    classes: int
    specification: Specification
    layers: _containers.RepeatedCompositeFieldContainer[Layer]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, format: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., run: _Optional[str] = ..., round: _Optional[int] = ..., sender: _Optional[str] = ..., signature: _Optional[str] = ..., samples: _Optional[int] = ..., classes: _Optional[int] = ..., specification: _Optional[_Union[Specification, _Mapping]] = ..., layers: _Optional[_Iterable[_Union[Layer, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("total", "offset", "data")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    total: int
    offset: int
    data: bytes
    def __init__(self, total: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
