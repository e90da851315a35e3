"""A real server, called over real gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from dragoman_bundle.bundle import Bundle, Samples
from dragoman_bundle.manifest import MANIFEST, Limits
from dragoman_client import (
    AsyncClient,
    BeamSearch,
    Client,
    DeadlineExceededError,
    DecodingOptions,
    DragomanError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from dragoman_export.bundling import export_bundle, load_step_model
from dragoman_export.decoding import greedy_search
from dragoman_export.evaluation import encode_source
from dragoman_export.options import VARIANT_KINDS
from dragoman_export.restoring import restore_source
from dragoman_export.tokenization import END_ID, load_tokenizer
from dragoman_protos.v1 import translation_pb2 as pb
from tests.e2e.server_process import ServerProcess, running_server
from tests.reversal import DIRECTION, reverse, sentences

PAIR: dict[str, Any] = {"source": "fwd", "target": "rev"}
TRANSLATE = "/dragoman.v1.TranslationService/Translate"


def raw_call(server: ServerProcess, request: bytes, timeout: float = 10) -> pb.TranslateResponse:
    """Send bytes as they are."""
    with grpc.insecure_channel(server.address) as channel:
        method: Any = channel.unary_unary(TRANSLATE, response_deserializer=pb.TranslateResponse.FromString)
        response: pb.TranslateResponse = method(request, timeout=timeout)
        return response


def refusal(server: ServerProcess, request: pb.TranslateRequest | bytes) -> tuple[grpc.StatusCode, str]:
    """The status with which a request is refused."""
    with pytest.raises(grpc.RpcError) as caught:
        raw_call(server, request if isinstance(request, bytes) else request.SerializeToString())
    error: Any = caught.value
    return error.code(), error.details()


def a_request(*texts: str, **fields: Any) -> pb.TranslateRequest:
    return pb.TranslateRequest(texts=texts, **({"source_language": "fwd", "target_language": "rev"} | fields))


def test_a_translation_comes_back_with_its_facts(server: ServerProcess) -> None:
    response = raw_call(server, a_request("ba be bi", "da").SerializeToString())
    assert [t.text for t in response.translations] == ["bi be ba", "da"]
    assert [t.finish_reason for t in response.translations] == [pb.FINISH_REASON_EOS] * 2
    assert response.translations[0].source_tokens > response.translations[0].target_tokens > 0
    assert (response.model, response.model_version) == ("reversal", "1")
    timings = response.timings
    assert 0 < timings.encode_seconds < timings.total_seconds
    assert 0 < timings.decode_seconds < timings.total_seconds


@pytest.mark.parametrize("precision", ["fp32", "int8"])
async def test_64_concurrent_clients_get_what_each_gets_alone(
    precision: str, reversal_models: Path, reversal_bundle: Bundle
) -> None:
    texts = sentences(64, seed=21, shortest=1, longest=16)
    variant = reversal_bundle.variant("cpu", precision)
    assert variant is not None
    tokenizer = load_tokenizer(reversal_bundle.file("tokenizer.model"))
    model = load_step_model(reversal_bundle, variant)
    reference = [
        tokenizer.decode(greedy_search(model, [encode_source(tokenizer, text, DIRECTION)])[0]) for text in texts
    ]
    with running_server(reversal_models, "--precision", precision, "--slots", "24") as server:
        clients = [AsyncClient(server.address) for _ in texts]
        alone = [(await client.translate(text, **PAIR)).text for client, text in zip(clients, texts, strict=True)]
        assert alone == reference
        for _ in range(5):
            calls = (client.translate(text, **PAIR) for client, text in zip(clients, texts, strict=True))
            together = await asyncio.gather(*calls)
            assert [translation.text for translation in together] == alone
        for client in clients:
            await client.close()
        rows = histogram(server.metrics(), "dragoman_step_rows")
        assert rows["sum"] > 1.2 * rows["count"], "the clients were not decoded side by side"


async def test_a_request_that_arrives_later_finishes_before_a_long_one(reversal_bundle: Bundle, tmp_path: Path) -> None:
    """The long one is long by construction: its end token cannot be chosen."""
    models = endless_model(reversal_bundle, tmp_path)
    with running_server(models, "--instances", "1") as server:
        async with AsyncClient(server.address) as client:
            long = asyncio.create_task(
                client.translate("ba be bi bo", options=DecodingOptions(max_target_tokens=4000), **PAIR)
            )
            await until_running(server)
            short = await client.translate("da de", options=DecodingOptions(max_target_tokens=3), **PAIR)
            assert not long.done()
            assert short.target_tokens == 3
            assert (await long).target_tokens == 4000
        rows = histogram(server.metrics(), "dragoman_step_rows")
        assert rows["count"] < 4003, "the short one did not share the long one's steps"


async def test_leaving_a_stream_frees_its_row(reversal_bundle: Bundle, tmp_path: Path) -> None:
    with running_server(endless_model(reversal_bundle, tmp_path), "--instances", "1") as server:
        async with AsyncClient(server.address) as client:
            stream = client.stream("ba be bi", options=DecodingOptions(max_target_tokens=5000), **PAIR)
            assert isinstance(await anext(stream), str)
            assert 'dragoman_running_rows{engine="0",model="reversal",version="1"} 1.0' in server.metrics()
            await stream.aclose()
            deadline = time.monotonic() + 10
            while 'dragoman_running_rows{engine="0",model="reversal",version="1"} 0.0' not in server.metrics():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
        page = server.metrics()
    assert (
        'dragoman_sequences_finished_total{model="reversal",priority="interactive",reason="cancelled",version="1"} 1.0'
        in page
    )
    labels = 'code="CANCELLED",method="TranslateStream",model="reversal",priority="interactive",version="1"'
    assert f"dragoman_requests_total{{{labels}}} 1.0" in page


def endless_model(bundle: Bundle, directory: Path) -> Path:
    """The toy model with an end token that it never produces, and room for thousands of tokens."""
    variant = bundle.variant("cpu", "fp32")
    assert variant is not None
    source = restore_source(bundle, variant)
    with torch.no_grad():
        # The first dimension becomes about 5 everywhere, and the end token's logit -10 times that.
        cast("Tensor", source.model.decoder_norm.bias)[0] += 5
        source.model.generator.weight[END_ID] = 0
        source.model.generator.weight[END_ID, 0] = -10
    source = dataclasses.replace(source, limits=Limits(max_source_tokens=64, max_target_tokens=5000))
    source = dataclasses.replace(source, samples=Samples([], source.samples.parity[:8]))
    export_bundle(source, directory / "reversal" / "1", [VARIANT_KINDS["cpu-fp32"]], [], lambda _: None)
    return directory


async def until_running(server: ServerProcess, num_rows: int = 1) -> None:
    """Wait until so many rows are being decoded."""
    deadline = time.monotonic() + 10
    while not re.search(rf"^dragoman_running_rows\{{.*\}} {num_rows}\.0$", server.metrics(), re.MULTILINE):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def histogram(page: str, name: str) -> dict[str, float]:
    """Sum and count of a histogram with one label set."""
    return {kind: float(re.search(rf"^{name}_{kind}{{.*}} (\S+)$", page, re.MULTILINE)[1]) for kind in ("sum", "count")}  # type: ignore[index]


@pytest.mark.parametrize(
    ("request_", "code", "messages"),
    [
        (a_request(), "INVALID_ARGUMENT", ["texts is empty"]),
        (a_request("ba", " \n", ""), "INVALID_ARGUMENT", ["texts[1] is empty", "texts[2] is empty"]),
        (a_request("ba", "\u200b\u00ad"), "INVALID_ARGUMENT", ["texts[1] has no visible character"]),
        (a_request("ba", source_language=""), "INVALID_ARGUMENT", ["source_language is not set"]),
        (
            a_request("", source_language="", target_language=""),
            "INVALID_ARGUMENT",
            ["texts[0] is empty", "source_language is not set", "target_language is not set"],
        ),
        (
            a_request("ba " * 100, splitting=pb.SPLITTING_NONE),
            "INVALID_ARGUMENT",
            ["texts[0] has more than 64 tokens, reversal takes at most 64 tokens in one piece"],
        ),
        (
            a_request("ba" + " " * 5000 + "be", splitting=pb.SPLITTING_NONE),
            "INVALID_ARGUMENT",
            ["texts[0] has 5004 characters, reversal takes at most 64 tokens"],
        ),
        (a_request("ba" * 500_001), "INVALID_ARGUMENT", ["texts has 1000002 characters, at most 1000000 are allowed"]),
        (
            a_request(
                "ba",
                "be",
                target_prefixes=["x"],
                splitting=9,
                priority=9,
            ),
            "INVALID_ARGUMENT",
            ["target_prefixes has 1 entries for 2 texts", "splitting is 9", "priority is 9"],
        ),
        (
            a_request(
                "ba",
                options=pb.DecodingOptions(
                    min_target_tokens=9,
                    max_target_tokens=8,
                    max_target_ratio=-1,
                    num_hypotheses=5,
                    beam=pb.BeamSearch(width=4, length_penalty=-1, coverage_penalty=float("nan"), patience=0),
                    repetition_penalty=0.5,
                    suppressed_texts=[" "],
                    end_pieces=["nowhere"],
                ),
            ),
            "INVALID_ARGUMENT",
            [
                "options.min_target_tokens is 9, above max_target_tokens, 8",
                "options.max_target_ratio is -1, it must be above 0",
                "options.num_hypotheses is 5, more than beam.width, 4",
                "options.beam.length_penalty is -1, it must be at least 0",
                "options.beam.coverage_penalty is nan",
                "options.beam.patience is 0, it must be above 0",
                "options.repetition_penalty is 0.5, it must be at least 1",
                "options.suppressed_texts[0] has no visible character",
                "options.end_pieces[0] is 'nowhere', which is not in the vocabulary",
            ],
        ),
        (
            a_request(
                "ba", options=pb.DecodingOptions(sampling=pb.Sampling(temperature=0, top_p=2), num_hypotheses=99)
            ),
            "INVALID_ARGUMENT",
            [
                "sampling.temperature is 0, it must be above 0",
                "sampling.top_p is 2",
                "num_hypotheses is 99, at most 16",
            ],
        ),
        (
            a_request("ba", options=pb.DecodingOptions(alternatives=pb.Alternatives(count=0), num_hypotheses=2)),
            "INVALID_ARGUMENT",
            ["alternatives.count is 0, it must be 1 to 16", "num_hypotheses is for beam and sampling"],
        ),
        (
            a_request("ba", options=pb.DecodingOptions(num_hypotheses=2)),
            "INVALID_ARGUMENT",
            ["num_hypotheses is 2, but greedy search has one result; set beam or sampling as well"],
        ),
        (
            a_request("ba", target_prefixes=["be " * 70]),
            "INVALID_ARGUMENT",
            ["target_prefixes[0] has 70 tokens, which leaves no room for a translation"],
        ),
        (a_request(*["ba"] * 1025), "INVALID_ARGUMENT", ["texts has 1025 entries, at most 1024 are allowed"]),
        (
            a_request("ba", options=pb.DecodingOptions(max_target_tokens=0)),
            "INVALID_ARGUMENT",
            ["options.max_target_tokens must be at least 1"],
        ),
        (
            a_request("ba", options=pb.DecodingOptions(max_target_tokens=65)),
            "INVALID_ARGUMENT",
            ["options.max_target_tokens is 65, reversal gives at most 64"],
        ),
        (a_request("ba", target_language="xx"), "NOT_FOUND", ["no model translates fwd→xx; available: fwd→rev"]),
        (a_request("ba", model="other"), "NOT_FOUND", ["there is no model 'other'; there is reversal"]),
        (b"\xff\xff\xff", "INVALID_ARGUMENT", ["not an encoded dragoman.v1.TranslateRequest"]),
        (
            a_request("ba").SerializeToString() + b"\x0a\x04ab\xff\xfe" + b"\x12\x01\xe9",
            "INVALID_ARGUMENT",
            ["texts[1] is not valid UTF-8: invalid start byte at byte 2", "source_language is not valid UTF-8"],
        ),
        (
            a_request("ba").SerializeToString() + b"\x98\x06\x01" + b"\x2a\x03\x98\x06\x01",
            "INVALID_ARGUMENT",
            ["TranslateRequest has an unknown field, number 99", "options has an unknown field, number 99"],
        ),
    ],
)
def test_a_bad_request_gets_its_code_and_says_what_to_change(
    request_: pb.TranslateRequest | bytes, code: str, messages: list[str], server: ServerProcess
) -> None:
    found, details = refusal(server, request_)
    assert found.name == code
    for message in messages:
        assert message in details


def test_nothing_is_cut_silently(server: ServerProcess) -> None:
    with Client(server.address) as client:
        cut = client.translate("ba be bi bo", options=DecodingOptions(max_target_tokens=2), **PAIR)
        whole = client.translate("ba be bi bo", **PAIR)
    assert (cut.finish_reason, cut.complete, cut.target_tokens) == ("length", False, 2)
    assert (whole.finish_reason, whole.complete, whole.text) == ("eos", True, "bo bi be ba")


def test_a_call_of_several_texts_succeeds_or_fails_as_a_whole(server: ServerProcess) -> None:
    texts = sentences(300, seed=31)
    with Client(server.address) as client:
        assert [t.text for t in client.translate_batch(texts, **PAIR)] == [
            client.translate(text, **PAIR).text for text in texts
        ]
        with pytest.raises(InvalidRequestError, match=r"texts\[1\] is empty"):
            client.translate_batch(["ba", ""], **PAIR)


def test_models_are_listed(server: ServerProcess) -> None:
    with Client(server.address) as client:
        [model] = client.models()
    assert (model.name, model.version, model.directions) == ("reversal", "1", (("fwd", "rev"),))
    assert (model.precision, model.device, model.max_source_tokens) == ("int8", "cpu", 64)


def test_errors_are_typed(server: ServerProcess) -> None:
    with Client(server.address) as client:
        with pytest.raises(NotFoundError) as caught:
            client.translate("ba", source="fwd", target="xx")
        assert caught.value.code is grpc.StatusCode.NOT_FOUND
    with Client("localhost:1") as nobody, pytest.raises(UnavailableError):
        nobody.translate("ba", **PAIR)


def test_health_is_known_per_service(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "dragoman.v1.TranslationService"):
            response = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=5)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_describes_the_service(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest
        listed, described = stub.ServerReflectionInfo(
            iter([request(list_services=""), request(file_containing_symbol="dragoman.v1.TranslationService")]),
            timeout=5,
        )
    names = {service.name for service in listed.list_services_response.service}
    assert {"dragoman.v1.TranslationService", "grpc.health.v1.Health"} <= names
    file = FileDescriptorProto.FromString(described.file_descriptor_response.file_descriptor_proto[0])
    assert [method.name for method in file.service[0].method] == [
        "Translate", "TranslateStream", "Score", "ListModels", "GetModel",
    ]  # fmt: skip


def test_metrics_count_what_happened(reversal_models: Path) -> None:
    with running_server(reversal_models) as server:
        with Client(server.address) as client:
            client.translate_batch(["ba be", "da"], **PAIR)
            with pytest.raises(DragomanError):
                client.translate("ba", source="fwd", target="xx")
        page = server.metrics()
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    model, version, priority = ("model", "reversal"), ("version", "1"), ("priority", "interactive")
    method, unknown = ("method", "Translate"), [("model", ""), ("priority", ""), ("version", "")]
    assert samples["dragoman_requests_total", ("code", "OK"), method, model, priority, version] == 1
    assert samples["dragoman_requests_total", ("code", "NOT_FOUND"), method, *unknown] == 1
    assert samples["dragoman_errors_total", ("reason", "NOT_FOUND")] == 1
    assert samples["dragoman_sequences_finished_total", model, priority, ("reason", "eos"), version] == 2
    assert samples["dragoman_target_tokens_count", model, version] == 2
    assert samples["dragoman_queue_depth", model, priority, version] == 0
    assert samples["dragoman_running_rows", ("engine", "0"), model, version] == 0
    for phase in ("queue", "encode", "first_token", "inter_token", "decode", "total"):
        expected = 1 if phase == "inter_token" else 2  # one of the texts has a single token
        assert samples["dragoman_phase_seconds_count", model, ("phase", phase), priority, version] == expected
    for phase in ("tokenize", "detokenize"):
        assert samples["dragoman_phase_seconds_count", model, ("phase", phase), priority, version] == 1
    buckets = [
        float(dict(cast("list[tuple[str, str]]", labels))["le"])
        for name, *labels in samples
        if name == "dragoman_phase_seconds_bucket" and ("phase", "total") in labels
    ]
    assert len(buckets) >= 30
    assert (min(buckets), max(b for b in buckets if b != float("inf"))) == (0.0005, 60.0)


def test_goldens_are_not_counted_as_traffic(reversal_models: Path) -> None:
    with running_server(reversal_models) as fresh:
        page = fresh.metrics()
    assert 'dragoman_step_rows_count{model="reversal",version="1"} 0.0' in page


async def test_sigterm_lets_running_calls_end(reversal_models: Path) -> None:
    with running_server(reversal_models) as server:
        async with AsyncClient(server.address) as client:
            await client.translate("ba", **PAIR)  # connected
            calls = [asyncio.create_task(client.translate(text, **PAIR)) for text in sentences(200, seed=41)]
            await asyncio.sleep(0.03)
            code = await asyncio.to_thread(server.stop)
            results = await asyncio.gather(*calls, return_exceptions=True)
        answered = [result for result in results if not isinstance(result, BaseException)]
        refused = [result for result in results if isinstance(result, BaseException)]
        assert code == 0
        assert answered
        assert {type(result) for result in refused} <= {UnavailableError}, refused


async def test_a_long_call_ends_after_sigterm_and_a_new_one_is_refused(reversal_bundle: Bundle, tmp_path: Path) -> None:
    with running_server(endless_model(reversal_bundle, tmp_path)) as server:
        async with AsyncClient(server.address) as client:
            # A beam's steps take long enough for the client to try the refused call as often as it wants to.
            endless = DecodingOptions(max_target_tokens=4000, search=BeamSearch(width=4))
            long = asyncio.create_task(client.translate("ba be", options=endless, **PAIR))
            await until_running(server, num_rows=4)
            server.process.terminate()
            while "stopping" not in server.log():
                await asyncio.sleep(0.01)
            with pytest.raises(UnavailableError, match=r"shutting down|unhealthy"):
                await client.translate("da", options=DecodingOptions(max_target_tokens=1), **PAIR)
            assert not long.done()
            assert (await long).target_tokens == 4000
        assert await asyncio.to_thread(server.process.wait, 10) == 0


def test_an_overloaded_server_refuses_at_once(reversal_models: Path) -> None:
    with running_server(reversal_models, "--slots", "1", "--max-waiting", "2") as server:
        with (
            Client(server.address) as client,
            pytest.raises(OverloadedError, match="makes 50 sequences, more may not wait than 2"),
        ):
            client.translate_batch(["ba be bi"] * 50, **PAIR)
        with Client(server.address) as client:
            assert client.translate("ba be", **PAIR).text == "be ba"


async def test_a_caller_that_goes_away_frees_its_slot(reversal_bundle: Bundle, tmp_path: Path) -> None:
    with running_server(endless_model(reversal_bundle, tmp_path), "--slots", "1") as server:
        async with AsyncClient(server.address) as client:
            with pytest.raises(DeadlineExceededError):
                await client.translate("ba be", options=DecodingOptions(max_target_tokens=5000), timeout=0.1, **PAIR)
            short = await client.translate("da", options=DecodingOptions(max_target_tokens=1), timeout=5, **PAIR)
            assert short.target_tokens == 1
        assert re.search(r'reason="(cancelled|deadline)",version="1"} 1.0', server.metrics())


def refused_start(*options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "dragoman_server", "--port", "0", "--metrics-port", "0", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return result.returncode, result.stderr


def test_a_damaged_bundle_is_not_served(reversal_models: Path, tmp_path: Path) -> None:
    models = Path(shutil.copytree(reversal_models, tmp_path / "models"))
    with (models / "reversal" / "1" / "weights.cpu-int8.bin").open("r+b") as weights:
        weights.seek(500)
        weights.write(b"\x55\x55")
    code, message = refused_start("--models", str(models))
    assert code == 1
    assert "file weights.cpu-int8.bin has changed" in message


def test_a_bundle_whose_tokenizer_is_none_is_not_served(reversal_models: Path, tmp_path: Path) -> None:
    """Its digest is right, so it is SentencePiece that finds out."""
    models = Path(shutil.copytree(reversal_models, tmp_path / "models"))
    junk, path = b"no model", models / "reversal" / "1" / MANIFEST
    (path.parent / "tokenizer.model").write_bytes(junk)
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["files"]["tokenizer.model"] = {"sha256": hashlib.sha256(junk).hexdigest(), "size": len(junk)}
    path.write_text(json.dumps(manifest), encoding="utf-8")
    code, message = refused_start("--models", str(models))
    assert code == 1
    assert "SentencePiece cannot read tokenizer.model" in message


def test_a_bundle_with_wrong_goldens_is_not_served(reversal_models: Path, tmp_path: Path) -> None:
    models = Path(shutil.copytree(reversal_models, tmp_path / "models"))
    path = models / "reversal" / "1" / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8"))
    golden = manifest["variants"][1]["goldens"][0]
    golden["token_ids"][0] += 1
    golden["translation"] = "something else"
    path.write_text(json.dumps(manifest), encoding="utf-8")
    code, message = refused_start("--models", str(models))
    assert code == 1
    assert f"golden request '{golden['text']}' gives '{reverse(golden['text'])}', not 'something else'" in message


def test_the_newest_version_is_served(reversal_models: Path, tmp_path: Path) -> None:
    for version in ("2", "10"):
        shutil.copytree(reversal_models / "reversal" / "1", tmp_path / "reversal" / version)
    with running_server(tmp_path) as server, Client(server.address) as client:
        assert client.models()[0].version == "10"


def test_an_empty_repository_and_wrong_settings_are_explained(tmp_path: Path) -> None:
    code, message = refused_start("--models", str(tmp_path))
    assert code == 1
    assert "holds no model; it must contain <name>/<version>/manifest.json" in message
    code, message = refused_start("--slots", "0", "--drain-seconds", "-1", "--port", "x")
    assert code == 2
    assert all(flag in message for flag in ("--slots", "--drain-seconds", "--port"))


def test_a_taken_port_is_an_error(server: ServerProcess, reversal_models: Path) -> None:
    port = server.address.rpartition(":")[2]
    code, message = refused_start("--models", str(reversal_models), "--port", port)
    assert code == 1
    assert port in message
