from dragoman_protos.v1 import translation_pb2 as _translation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListRepositoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRepositoryResponse(_message.Message):
    __slots__ = ("entries",)
    class Entry(_message.Message):
        __slots__ = ("name", "version", "is_loaded")
        NAME_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        IS_LOADED_FIELD_NUMBER: _ClassVar[int]
        name: str
        version: str
        is_loaded: bool
        def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., is_loaded: _Optional[bool] = ...) -> None: ...
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[ListRepositoryResponse.Entry]
    def __init__(self, entries: _Optional[_Iterable[_Union[ListRepositoryResponse.Entry, _Mapping]]] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("name", "version", "label")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    label: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., label: _Optional[str] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("name", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetRoutingRequest(_message.Message):
    __slots__ = ("name", "routing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    name: str
    routing: Routing
    def __init__(self, name: _Optional[str] = ..., routing: _Optional[_Union[Routing, _Mapping]] = ...) -> None: ...

class Routing(_message.Message):
    __slots__ = ("stable", "canary", "canary_share")
    STABLE_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    CANARY_SHARE_FIELD_NUMBER: _ClassVar[int]
    stable: str
    canary: str
    canary_share: float
    def __init__(self, stable: _Optional[str] = ..., canary: _Optional[str] = ..., canary_share: _Optional[float] = ...) -> None: ...
