"""Bundles that somebody made to do harm are refused before anything else opens them."""

from __future__ import annotations

import ast
import copy as copying
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, TensorProto, helper

from dragoman_bundle import graph_file
from dragoman_bundle.bundle import Bundle, load_bundle
from dragoman_bundle.graph_file import GraphFileError, read_references
from dragoman_bundle.manifest import MANIFEST, BundleError
from tests.bundles import DECODER, ENCODER, WEIGHTS, external_tensor, graph_model, replace_file, write_bundle

ROOT = Path(__file__).parent.parent.parent
OUTSIDE = "../../etc/passwd"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


def problems(path: Path) -> list[str]:
    with pytest.raises(BundleError) as caught:
        load_bundle(path)
    return caught.value.problems


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def test_the_tiny_bundle_is_accepted(bundle: Path) -> None:
    assert load_bundle(bundle).manifest.name == "tiny"


@pytest.mark.parametrize(
    "location",
    [
        OUTSIDE,
        "/etc/passwd",
        "./weights.bin",
        "sub/../weights.bin",
        "unlisted.bin",
        "manifest.json",
        "*/_ORT_MEM_ADDR_/*",  # ONNX Runtime's name for its own memory, the offset being an address
        "weights.bin\0",
        "WEIGHTS.BIN",
        "",
        "file:///etc/passwd",
    ],
)
def test_a_tensor_outside_the_listed_files_is_refused(bundle: Path, location: str) -> None:
    (bundle / "unlisted.bin").write_bytes(b"1234")
    replace_file(bundle, DECODER, graph_model(external_tensor(location)).SerializeToString())
    assert problems(bundle) == [
        f"graph {DECODER} has a tensor in {location!r}, which is not a file that the manifest lists"
    ]


def hidden(tensor: TensorProto) -> Iterator[tuple[str, onnx.ModelProto]]:
    """A model per place where a graph can hide a tensor."""
    sparse = onnx.SparseTensorProto(values=tensor, dims=[1])
    inner = helper.make_graph([], "inner", [], [], initializer=[tensor])
    attributes = {
        "t": AttributeProto(name="a", type=AttributeProto.TENSOR, t=tensor),
        "tensors": AttributeProto(name="a", type=AttributeProto.TENSORS, tensors=[tensor]),
        "g": AttributeProto(name="a", type=AttributeProto.GRAPH, g=inner),
        "graphs": AttributeProto(name="a", type=AttributeProto.GRAPHS, graphs=[inner]),
        "sparse_tensor": AttributeProto(name="a", type=AttributeProto.SPARSE_TENSOR, sparse_tensor=sparse),
        "sparse_tensors": AttributeProto(name="a", type=AttributeProto.SPARSE_TENSORS, sparse_tensors=[sparse]),
        # Without a type, a reader may still look at it.
        "untyped": AttributeProto(name="a", t=tensor),
    }
    for name, attribute in attributes.items():
        model = graph_model()
        model.graph.node[0].attribute.append(attribute)
        yield f"attribute {name}", model
        model = graph_model()
        function = onnx.FunctionProto(name="f", node=[onnx.NodeProto(op_type="Constant", attribute=[attribute])])
        model.functions.append(function)
        yield f"function's {name}", model
    model = graph_model()
    model.functions.append(onnx.FunctionProto(name="f", attribute_proto=[attributes["t"]]))
    yield "function's default", model
    yield "initializer", graph_model(tensor)
    model = graph_model()
    model.graph.sparse_initializer.append(sparse)
    yield "sparse initializer", model
    model = graph_model()
    model.graph.sparse_initializer.append(onnx.SparseTensorProto(indices=tensor))
    yield "sparse initializer's indices", model
    for place in ("initialization", "algorithm"):
        model = graph_model()
        getattr(model.training_info.add(), place).CopyFrom(inner)
        yield f"training {place}", model


@pytest.mark.parametrize(("place", "model"), list(hidden(external_tensor(OUTSIDE))))
def test_a_tensor_is_found_wherever_it_hides(place: str, model: onnx.ModelProto, bundle: Path) -> None:
    replace_file(bundle, ENCODER, model.SerializeToString())
    assert any(OUTSIDE in problem for problem in problems(bundle)), place


def test_the_table_of_fields_is_complete() -> None:
    """Every way from a model to a tensor that onnx itself knows; so a new version of ONNX cannot add one unseen."""
    known: dict[str, dict[int, str]] = {}

    def holds_tensors(descriptor: Any, above: frozenset[str] = frozenset()) -> bool:
        name = descriptor.name.removesuffix("Proto")
        if name == "Tensor" and descriptor.full_name == "onnx.TensorProto":
            return True
        if descriptor.full_name in above:
            return name in {"Graph", "Attribute", "Node"}  # a graph in a graph
        fields = {
            field.number: field.message_type.name.removesuffix("Proto")
            for field in descriptor.fields
            if field.message_type and holds_tensors(field.message_type, above | {descriptor.full_name})
        }
        if fields:
            known[name] = fields
        return bool(fields)

    assert holds_tensors(onnx.ModelProto.DESCRIPTOR)
    assert known == graph_file._TENSORS_BELOW
    numbers = {field.name: field.number for field in onnx.TensorProto.DESCRIPTOR.fields}
    assert (numbers["external_data"], numbers["data_location"]) == (
        graph_file._EXTERNAL_DATA,
        graph_file._DATA_LOCATION,
    )
    numbers = {field.name: field.number for field in onnx.NodeProto.DESCRIPTOR.fields}
    assert (numbers["op_type"], numbers["domain"]) == (graph_file._OP_TYPE, graph_file._DOMAIN)


def test_a_place_counts_whether_or_not_the_tensor_says_that_it_is_external(bundle: Path) -> None:
    tensor = external_tensor(OUTSIDE)
    tensor.ClearField("data_location")
    replace_file(bundle, ENCODER, graph_model(tensor).SerializeToString())
    assert len(problems(bundle)) == 1


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"offset": "1", "length": "4"}, "ends after the file's 4 bytes"),
        ({"offset": "5"}, "ends after the file's 4 bytes"),
        ({"length": "999999999999999999"}, "ends after the file's 4 bytes"),
        ({"offset": "-1"}, "'-1' is not a place in a file"),
        ({"offset": "٣"}, "'٣' is not a place in a file"),
        ({"length": "9" * 5000}, "is not a place in a file"),
        ({"length": ""}, "'' is not a place in a file"),
        ({"prepacked_0": "x|0;4"}, "external data has the keys ['location', 'prepacked_0']"),
    ],
)
def test_a_place_that_is_not_in_the_file_is_refused(bundle: Path, keys: dict[str, str], problem: str) -> None:
    replace_file(bundle, ENCODER, graph_model(external_tensor(WEIGHTS, **keys)).SerializeToString())
    [found] = problems(bundle)
    assert problem in found


def test_a_bad_place_is_not_forgotten_for_a_good_one_in_the_same_file(bundle: Path) -> None:
    bad, good = external_tensor(WEIGHTS, offset="9"), external_tensor(WEIGHTS, offset="0")
    for tensors in ([bad, good], [good, bad]):
        replace_file(bundle, ENCODER, graph_model(*tensors).SerializeToString())
        assert len(problems(bundle)) == 1


def test_two_places_for_one_tensor_are_refused(bundle: Path) -> None:
    tensor = external_tensor(WEIGHTS)
    tensor.external_data.add(key="location", value=OUTSIDE)
    replace_file(bundle, ENCODER, graph_model(tensor).SerializeToString())
    assert "['location', 'location']" in problems(bundle)[0]


def test_an_external_tensor_without_a_place_is_refused(bundle: Path) -> None:
    tensor = external_tensor(WEIGHTS)
    tensor.ClearField("external_data")
    replace_file(bundle, ENCODER, graph_model(tensor).SerializeToString())
    assert "external data has the keys []" in problems(bundle)[0]


def test_an_operator_from_a_library_is_refused(bundle: Path) -> None:
    model = graph_model()
    model.graph.node.append(helper.make_node("Run", [], ["z"], domain="ai.evil"))
    replace_file(bundle, ENCODER, model.SerializeToString())
    assert problems(bundle) == [
        f"graph {ENCODER} needs operator 'Run' of 'ai.evil'; libraries of operators are never loaded"
    ]


def test_another_graph_format_is_refused(bundle: Path) -> None:
    replace_file(bundle, "encoder.ort", (bundle / ENCODER).read_bytes())
    edit(bundle, lambda manifest: manifest["variants"][0].update(encoder="encoder.ort"))
    assert problems(bundle) == ["graph encoder.ort does not end in .onnx"]


def field(tag: int, content: bytes) -> bytes:
    """A message as a field of another; protobuf itself refuses to write very deep ones."""
    size, length = bytearray(), len(content)
    while length > 0x7F:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([tag]) + size + bytes([length]) + content


def nested_graphs(depth: int) -> bytes:
    """A model with a graph in an attribute of a node of a graph, and so on."""
    content = b""
    for _ in range(depth):
        for tag in (0x32, 0x2A, 0x0A):  # Attribute.g, Node.attribute, Graph.node
            content = field(tag, content)
    return field(0x3A, content)  # Model.graph


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "there is no graph in it"),
        (b"\x08\x07", "there is no graph in it"),
        (b"\x3a", "breaks off"),
        (b"\x3a\x05\x0a", "breaks off"),
        (b"\x3a" + b"\xff" * 10, "breaks off"),
        (b"\x3a" + b"\xff" * 9 + b"\x01", "breaks off"),
        (b"\x00\x00", "no protobuf message"),
        (b"\x3b\x3c", "wire type 3"),
        (b"\x38\x01", "field 7 is of another type"),
        (b"\x3a\x04\x2a\x02\x68\x01", "field 13 is of another type"),
        (b"\x3a\x05\x0a\x03\x22\x01\xff", "a name is not UTF-8"),
    ],
)
def test_bytes_that_are_no_graph_are_explained(bundle: Path, content: bytes, problem: str) -> None:
    replace_file(bundle, ENCODER, content)
    [found] = problems(bundle)
    assert problem in found


def test_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_file, "MAX_FIELDS", 1000)
    read_references(b"\x3a\x00" + b"\x08\x01" * 999)
    with pytest.raises(GraphFileError, match="more than 1000 fields"):
        read_references(b"\x3a\x00" + b"\x08\x01" * 1000)
    with pytest.raises(GraphFileError, match="more than 1000 fields"):
        read_references(nested_graphs(30) + field(0x3A, field(0x0A, b"\x0a\x00" * 1000)))


def test_nesting_is_bounded() -> None:
    assert read_references(nested_graphs(33)).tensors == frozenset()
    for depth in (34, 1000):
        with pytest.raises(GraphFileError, match="more than 100 deep"):
            read_references(nested_graphs(depth))


def test_what_onnx_reads_is_what_is_checked() -> None:
    """On the bundled model, the walk finds exactly the places and operators that onnx's own classes find."""
    for path in sorted((ROOT / "deploy" / "models").glob("*/*/*.onnx")):
        graph = onnx.load(path, load_external_data=False).graph
        found = read_references(path.read_bytes())
        assert found.operators == {(node.domain, node.op_type) for node in graph.node}
        places = [{entry.key: entry.value for entry in t.external_data} for t in graph.initializer if t.external_data]
        expected = {(p["location"], int(p["offset"]), int(p["length"])) for p in places}
        assert {(t.location, t.offset, t.length) for t in found.tensors} == expected


def link(bundle: Path, name: str, target: Path) -> None:
    (bundle / name).unlink()
    (bundle / name).symlink_to(target)


def test_links_stay_inside_the_bundle(bundle: Path, tmp_path: Path) -> None:
    content = (bundle / WEIGHTS).read_bytes()
    (tmp_path / "secret").write_bytes(content)
    link(bundle, WEIGHTS, tmp_path / "secret")
    assert problems(bundle) == [f"file {WEIGHTS} is a link that leaves the bundle"]
    (bundle / "..moved").mkdir()  # how Kubernetes mounts files
    (bundle / "..moved" / WEIGHTS).write_bytes(content)
    link(bundle, WEIGHTS, Path("..moved") / WEIGHTS)
    load_bundle(bundle)
    link(bundle, WEIGHTS, bundle / WEIGHTS)
    assert "cannot be read" in problems(bundle)[0]


def test_a_manifest_elsewhere_is_refused(bundle: Path, tmp_path: Path) -> None:
    (bundle / MANIFEST).rename(tmp_path / MANIFEST)
    (bundle / MANIFEST).symlink_to(tmp_path / MANIFEST)
    assert problems(bundle) == [f"{MANIFEST} is a link that leaves the bundle"]


def test_a_bundle_may_itself_be_reached_by_a_link(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(bundle)
    load_bundle(tmp_path / "current")


def test_what_is_not_a_file_is_not_opened(bundle: Path) -> None:
    (bundle / WEIGHTS).unlink()
    os.mkfifo(bundle / WEIGHTS)  # to open it would wait for a writer, for ever
    assert problems(bundle) == [f"file {WEIGHTS} is not a regular file"]


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", ".", "", "a/b", "a\0b", "\ud800", "é", ".hidden", "x" * 999])
def test_names_are_plain(bundle: Path, name: str) -> None:
    edit(bundle, lambda manifest: manifest["files"].update({name: manifest["files"][WEIGHTS]}))
    [found] = problems(bundle)
    assert found.startswith(f"file name {name!r} ")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m["architecture"].update(decoder_layers=10**12), "tensors that are not those"),
        (lambda m: m["limits"].update(max_target_tokens=-1), "limits.max_target_tokens is -1"),
        (lambda m: m["limits"].update(max_source_tokens=2**40), "limits.max_source_tokens is"),
        (lambda m: m["generated_length"].update(factor=1e300), "generated_length.factor is"),
        (lambda m: m["generated_length"].update(factor=float("nan")), "factor must be a finite number"),
        (lambda m: m["generated_length"].update(factor=float("inf")), "factor must be a finite number"),
        (lambda m: m.update(name="\ud800"), "manifest.name must be text"),
    ],
)
def test_numbers_and_text_of_a_manifest_are_sane(
    bundle: Path, change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    edit(bundle, change)
    assert any(problem in found for found in problems(bundle))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"format_version": 1, "x": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"format_version": 1, "name": ' + "[" * 900 + "]" * 900 + "}", ""),
        ("[]", "format_version None"),
        ("\ufeff{}", "is not JSON"),
        (" " * (16 * 2**20 + 1), "at most 16777216 are read"),
    ],
)
def test_a_hostile_manifest_is_explained(bundle: Path, text: str, problem: str) -> None:
    (bundle / MANIFEST).write_text(text, encoding="utf-8")
    assert any(problem in found for found in problems(bundle))


def outcome(path: Path) -> Bundle | BundleError:
    """What `load_bundle` does, which is one of two things, soon."""
    begun = time.monotonic()
    try:
        return load_bundle(path)
    except BundleError as error:
        str(error).encode("utf-8", "backslashreplace")
        return error
    finally:
        assert time.monotonic() - begun < 10


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**30, -(10**400), 2**63, -1, 0, 1e308, "../x", "", "\ud800", "a\0b", "cpu", "fp16", "float16"])
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


@st.composite
def mutated(draw: st.DrawFn, original: dict[str, Any]) -> dict[str, Any]:
    """The manifest with a few fields removed, replaced, swapped or added."""
    manifest = copying.deepcopy(original)
    for _ in range(draw(st.integers(1, 4))):
        spots = list(places(manifest))
        container, key = draw(st.sampled_from(spots))
        match draw(st.sampled_from(["remove", "replace", "swap", "add", "nest"])):
            case "remove":
                del container[key]
            case "replace":
                container[key] = draw(JUNK)
            case "swap":
                other, other_key = draw(st.sampled_from(spots))
                container[key] = copying.deepcopy(other[other_key])
            case "add" if isinstance(container, dict):
                container[draw(st.text(max_size=6))] = draw(JUNK)
            case _:
                container[key] = [container[key]]
    return manifest


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that the fuzz tests damage again and again."""
    return write_bundle(tmp_path_factory.mktemp("fuzz") / "bundle")


ORIGINAL: dict[str, Any] = {}


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_manifest_is_accepted_or_refused(victim: Path, data: st.DataObject) -> None:
    if not ORIGINAL:
        ORIGINAL.update(json.loads((victim / MANIFEST).read_text(encoding="utf-8")))
    (victim / MANIFEST).write_text(json.dumps(data.draw(mutated(ORIGINAL))), encoding="utf-8")
    outcome(victim)


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=200) | st.text(alphabet='{}[]",:0123456789e-+.NIa', max_size=60).map(str.encode))
def test_any_bytes_for_a_manifest_are_refused(victim: Path, content: bytes) -> None:
    (victim / MANIFEST).write_bytes(content)
    assert isinstance(outcome(victim), BundleError)


def sample_graphs() -> list[bytes]:
    small = [model.SerializeToString() for _, model in hidden(external_tensor(WEIGHTS, offset="0", length="4"))]
    return [*small, (ROOT / "deploy/models/zh-en/1/search.cpu-int8.onnx").read_bytes()]


@st.composite
def broken_graph(draw: st.DrawFn) -> bytes:
    """A graph cut short, with bytes changed, or with bytes put in."""
    content = bytearray(draw(st.sampled_from(GRAPHS)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(["cut", "flip", "insert", "repeat"])):
            case "cut":
                del content[at:]
            case "flip" if at < len(content):
                content[at] ^= draw(st.integers(1, 255))
            case "insert":
                content[at:at] = draw(st.binary(max_size=12))
            case _:
                content[at:at] = content[at : at + draw(st.integers(0, 40))]
    return bytes(content)


GRAPHS = sample_graphs()


@settings(max_examples=600, deadline=None)
@given(content=broken_graph() | st.binary(max_size=300))
def test_any_bytes_are_a_graph_or_refused(content: bytes) -> None:
    """And whatever onnx reads as a graph with a tensor elsewhere is never read here as one without."""
    try:
        found = read_references(content)
    except GraphFileError:
        return
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except Exception:  # noqa: BLE001 - protobuf's DecodeError; onnx's parser is stricter about some texts
        return
    for tensor in model.graph.initializer:
        location = [entry.value for entry in tensor.external_data if entry.key == "location"]
        assert set(location) <= {t.location for t in found.tensors}


@settings(max_examples=100, deadline=None)
@given(content=broken_graph())
def test_any_graph_in_a_bundle_is_accepted_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "graphs"
    if not path.exists():
        write_bundle(path)
    replace_file(path, ENCODER, content)
    outcome(path)


def names_used(tree: ast.AST) -> Iterator[str]:
    """Modules that a program imports, functions that it calls, keyword arguments that it gives."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module)):
                yield module.partition(".")[0]
            case ast.Call(func=ast.Name(id=name)):
                yield name
            case ast.Call(func=ast.Attribute(attr="register_custom_ops_library" as name)):
                yield name
            case ast.keyword(arg=str(name)):
                yield name


def test_nothing_that_reads_bundles_can_execute_what_is_in_them() -> None:
    """No pickle, no eval, no library of operators, in any module that a server loads."""
    modules = {"pickle", "marshal", "shelve", "dill", "joblib", "runpy", "onnxruntime_extensions", "torch"}
    calls = {"eval", "exec", "compile", "__import__", "register_custom_ops_library", "allow_pickle"}
    for package in ("export/dragoman_bundle", "server/dragoman_server"):
        for path in (ROOT / package).rglob("*.py"):
            assert not set(names_used(ast.parse(path.read_text(encoding="utf-8")))) & (modules | calls), path
