"""Anything may come over the wire: every call gets a documented status, and the server goes on."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dragoman_protos.v1 import admin_pb2
from dragoman_protos.v1 import translation_pb2 as pb
from tests.e2e.server_process import ServerProcess

DOCUMENTED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION"}
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in (pb, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
LOOK_REAL = {
    "source_language": ["fwd", "", "xx"],
    "target_language": ["rev", "", "xx"],
    "model": ["", "reversal", "../.."],
    "name": ["reversal", "", ".."],
    "texts": ["ba be bi", "", " ", "\u200b", "ba\n\nbe", "x" * 3000, "我", "\x00"],
    "sources": ["ba be", ""],
    "targets": ["be ba", ""],
    "target_prefixes": ["", "be"],
    "version": ["", "1", "stable", "2"],
    "model_version": ["", "1", "canary"],
}
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 70) | st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(0, 2) | st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 4) | st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_STRING: st.text(max_size=20),
}


def values(field: Any) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return messages(field.message_type)
    scalar = _SCALARS[field.cpp_type]
    return st.sampled_from(LOOK_REAL[field.name]) | scalar if field.name in LOOK_REAL else scalar


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor) -> Message:
    """Any message of a type; fields that are known by name are often plausible."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if not draw(st.booleans()):
            continue
        drawn = draw(st.lists(values(field), max_size=4)) if field.is_repeated else draw(values(field))
        if field.is_repeated:
            getattr(message, field.name).extend(drawn)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(drawn)
        else:
            setattr(message, field.name, drawn)
    return message


@st.composite
def mutated(draw: st.DrawFn, descriptor: Descriptor) -> bytes:
    """An encoded message, some of its bytes changed, cut off or doubled."""
    content = bytearray(draw(messages(descriptor)).SerializeToString())
    for _ in range(draw(st.integers(0, 4))):
        if not content:
            break
        place = draw(st.integers(0, len(content) - 1))
        match draw(st.sampled_from(["change", "cut", "double", "insert"])):
            case "change":
                content[place] = draw(st.integers(0, 255))
            case "cut":
                del content[place:]
            case "double":
                content[place:place] = content[: place + 1]
            case _:
                content[place:place] = draw(st.binary(max_size=8))
    return bytes(content)


def status_of(server: ServerProcess, path: str, request: bytes) -> str:
    """The status of a call, and of its stream's end."""
    with grpc.insecure_channel(server.address) as channel:
        try:
            if METHODS[path].server_streaming:
                stream: Any = channel.unary_stream(path)
                for _ in stream(request, timeout=5):
                    pass
            else:
                unary: Any = channel.unary_unary(path)
                unary(request, timeout=5)
        except grpc.RpcError as error:
            failed: Any = error
            code: str = failed.code().name
            return code
    return "OK"


SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("path", [path for path in METHODS if "Translation" in path])
@SETTINGS
@given(data=st.data())
def test_any_bytes_get_a_documented_status(path: str, server: ServerProcess, data: st.DataObject) -> None:
    request = data.draw(mutated(METHODS[path].input_type) | st.binary(max_size=200))
    assert status_of(server, path, request) in DOCUMENTED


@pytest.mark.parametrize("path", [path for path in METHODS if "Translation" in path])
@SETTINGS
@given(data=st.data())
def test_any_message_gets_a_documented_status(path: str, server: ServerProcess, data: st.DataObject) -> None:
    request = data.draw(messages(METHODS[path].input_type))
    assert status_of(server, path, request.SerializeToString()) in DOCUMENTED


@pytest.mark.parametrize("path", [path for path in METHODS if "Admin" in path])
@SETTINGS
@given(data=st.data())
def test_admin_calls_too(path: str, admin_server: ServerProcess, data: st.DataObject) -> None:
    request = data.draw(
        messages(METHODS[path].input_type).map(lambda m: m.SerializeToString()) | st.binary(max_size=60)
    )
    assert status_of(admin_server, path, request) in DOCUMENTED


async def test_afterwards_nothing_is_left_behind(server: ServerProcess) -> None:
    """Runs after the tests above, on the same server."""
    for _ in range(100):
        page = server.metrics()
        if not re.search(r"^dragoman_(running_rows|queue_depth)\{.*\} [1-9]", page, re.MULTILINE):
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("rows are still running")
    assert "Traceback" not in server.log()
    assert 'reason="BUG"' not in page
    labels = {
        (name, value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        for name, value in sample.labels.items()
    }
    assert {value for name, value in labels if name == "model"} <= {"", "reversal"}
    assert {value for name, value in labels if name == "version"} <= {"", "1"}
    assert {value for name, value in labels if name == "priority"} <= {"", "interactive", "bulk"}
    methods = {path.rpartition("/")[2] for path in METHODS}
    assert {value for name, value in labels if name == "method"} <= methods
    assert {name for name, _ in labels} <= {
        "model", "version", "priority", "method", "code", "reason", "phase", "engine", "device", "precision", "le",
    }  # fmt: skip
