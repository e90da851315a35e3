"""Keys, rights and rates."""

from __future__ import annotations

import hashlib
import logging
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_protos.v1 import admin_pb2, translation_pb2
from dragoman_server.access import (
    Caller,
    ExhaustedError,
    KeyRing,
    MissingKeyError,
    MissingRightError,
    UnknownKeyError,
    caller_from_auth_context,
    main,
    new_key,
    read_keys,
    required_right,
)
from dragoman_server.errors import NotAllowedError, RateLimitedError, UnauthenticatedError
from dragoman_server.gates import CertificateGate, KeyGate
from dragoman_server.rates import Rate, TokenBucket
from dragoman_server.watched_files import RefusedFileError

SECOND = 10**9
TRANSLATE, LOAD = "/dragoman.v1.TranslationService/Translate", "/dragoman.v1.AdminService/LoadModel"


class Clock:
    def __init__(self) -> None:
        self.now_ns = 5 * SECOND

    def __call__(self) -> int:
        return self.now_ns


def ring_of(path: Path, *entries: str, clock: Clock | None = None) -> KeyRing:
    path.write_text("".join(entries), encoding="utf-8")
    return KeyRing(path, clock or Clock())


def bearer(key: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "test"), ("authorization", f"Bearer {key}")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_a_key_says_who_calls(path: Path) -> None:
    key, entry = new_key("web")
    other, other_entry = new_key("ops", ["translate", "admin"])
    ring = ring_of(path, entry, other_entry)
    assert re.fullmatch("dgm_[A-Za-z0-9_-]{43}", key)
    assert key != other
    assert key not in path.read_text(encoding="utf-8")
    web = ring.authenticate(bearer(key))
    assert (web.name, set(web.rights), dict(web.rates)) == ("web", {"translate"}, {})
    assert ring.authenticate([("x-api-key", other)]).rights == {"translate", "admin"}
    assert ring.authenticate([("authorization", f"bearer   {key} "), ("x-api-key", key)]).name == "web"
    assert ring.authenticate([("authorization", "Basic eDp5"), ("x-api-key", key)]).name == "web"


def test_without_a_known_key_nobody_comes_in(path: Path) -> None:
    key, entry = new_key("web")
    other, other_entry = new_key("ops")
    ring = ring_of(path, entry, other_entry)
    for metadata in (None, [], [("authorization", "Basic eDp5")], [("authorization", key)], [("cookie", key)]):
        with pytest.raises(MissingKeyError, match="send it as metadata"):
            ring.authenticate(metadata)
    digest = hashlib.sha256(key.encode()).hexdigest()
    for unknown in ("", key[:-1], key + "x", key.upper(), digest, "\udcff", "é", "x" * 100_000):
        with pytest.raises(UnknownKeyError) as caught:
            ring.authenticate(bearer(unknown))
        assert str(caught.value) == "the key is not known", "it does not repeat what was sent"
    with pytest.raises(UnknownKeyError, match="several different keys"):
        ring.authenticate([*bearer(key), ("x-api-key", other)])
    with pytest.raises(UnknownKeyError):
        ring.authenticate([("authorization", b"Bearer \xff\xfe")])


def test_translating_is_not_loading_models() -> None:
    methods: dict[str, set[str]] = {"translate": set(), "admin": set()}
    for file in (translation_pb2, admin_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                methods[required_right(f"/{service.full_name}/{method.name}")].add(method.name)
    assert {"Translate", "TranslateStream", "Score", "ListModels", "GetModel"} <= methods["translate"]
    assert {"LoadModel", "UnloadModel", "SetRouting"} <= methods["admin"]
    assert not methods["translate"] & methods["admin"]
    for nobody_knows in (
        "/dragoman.v2.TranslationService/Translate",
        "/x/y",
        "",
        "/",
        "dragoman.v1.TranslationService",
    ):
        assert required_right(nobody_knows) == "admin"
    caller = Caller(name="web", rights=frozenset({"translate"}))
    caller.require("translate")
    with pytest.raises(MissingRightError, match="needs the right 'admin', but web has translate"):
        caller.require("admin")
    with pytest.raises(MissingRightError):
        Caller(name="ops", rights=frozenset({"admin"})).require("translate")


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        ("", ["it has no keys"]),
        ("keys = []", ["it has no keys"]),
        ("[keys]\nname = 'x'", ["begin each entry with [[keys]]"]),
        ("keys = [1]", ["begin each entry with [[keys]]"]),
        ("[[keys]", ["is not TOML"]),
        ("a = " + "[" * 5000, ["is not TOML"]),
        ("[[keys]]", ["keys[0] (without a name): name must be", "sha256 must be", "rights must be"]),
        (
            """
            extra = 1
            [[keys]]
            name = 'web'
            sha256 = 'abc'
            rights = []
            key = 'dgm_x'
            requests_per_second = 0
            characters_per_second = nan
            burst_seconds = true
            """,
            [
                "extra is not a known table",
                "keys[0] (web): key is not a known field",
                "keys[0] (web): sha256 must be 64 hexadecimal digits in lower case",
                "keys[0] (web): rights must be a list of one or more of translate, admin",
                "keys[0] (web): requests_per_second must be a number from 0.001 to 1e+09",
                "keys[0] (web): characters_per_second must be a number from 0.001 to 1e+12",
                "keys[0] (web): burst_seconds must be a number from 0.001 to 86400",
            ],
        ),
        (
            f"[[keys]]\nname = 'a b'\nsha256 = '{'A' * 64}'\nrights = ['all']",
            ["name must", "sha256 must", "rights must"],
        ),
        (
            f"[[keys]]\nname = 1\nsha256 = 2\nrights = 'admin'\nburst_seconds = 2\nrequests_per_second = {'9' * 400}",
            ["name must", "sha256 must", "rights must", "requests_per_second must"],
        ),
        (
            f"[[keys]]\nname = 'web'\nsha256 = '{'a' * 64}'\nrights = ['translate']\nburst_seconds = 2\n" * 2,
            ["burst_seconds means nothing"] * 2 + ["name web stands in 2 entries", "stands in 2 entries"],
        ),
    ],
)
def test_everything_wrong_with_a_file_is_said_at_once(path: Path, content: str, problems: list[str]) -> None:
    path.write_text(content, encoding="utf-8")
    with pytest.raises(RefusedFileError) as caught:
        KeyRing(path)
    found = caught.value.problems
    assert len(found) == len(problems), found
    for problem, expected in zip(found, problems, strict=True):
        assert expected in problem
        assert str(path) in problem


def test_a_file_that_is_not_there_is_refused(path: Path) -> None:
    with pytest.raises(RefusedFileError, match="cannot be read: No such file"):
        KeyRing(path)
    path.write_bytes(b"\xff")
    with pytest.raises(RefusedFileError, match="is not TOML"):
        KeyRing(path)


def test_a_changed_file_counts_at_once_and_a_broken_one_does_not(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (first, first_entry), (second, second_entry) = new_key("first"), new_key("second")
    ring = ring_of(path, first_entry)
    path.write_text(second_entry, encoding="utf-8")
    assert ring.authenticate(bearer(second)).name == "second"
    with pytest.raises(UnknownKeyError):
        ring.authenticate(bearer(first))
    path.write_text(second_entry + "[[keys]]\n", encoding="utf-8")
    for _ in range(3):
        assert ring.authenticate(bearer(second)).name == "second"
    path.unlink()
    assert ring.authenticate(bearer(second)).name == "second"
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert ["keys[1] (without a name): name must" in error for error in errors] == [True, False]
    assert "cannot be read" in errors[1]
    assert all("what was read before stays in use" in error for error in errors)
    path.write_text(first_entry, encoding="utf-8")
    assert ring.authenticate(bearer(first)).name == "first"


def test_both_rates_count_and_a_refused_call_costs_nothing(path: Path) -> None:
    clock = Clock()
    _, entry = new_key("web", requests_per_second=2, characters_per_second=100, burst_seconds=2)
    ring = ring_of(path, entry, clock=clock)
    ring.charge("web", 150)
    with pytest.raises(ExhaustedError) as caught:
        ring.charge("web", 100)
    assert (caught.value.caller, caught.value.which) == ("web", "characters_per_second")
    assert caught.value.retry_after_s == pytest.approx(0.5)
    for _ in range(3):  # the refused one has taken none of the four requests
        ring.charge("web", 0)
    with pytest.raises(ExhaustedError, match=r"web has used up its requests_per_second; try again in 0\.500 s"):
        ring.charge("web", 50)
    clock.now_ns += SECOND // 2
    ring.charge("web", 100)
    ring.charge("somebody with a certificate", 10**9)


def test_a_change_of_the_file_forgives_nothing_and_memory_is_bounded(path: Path) -> None:
    clock = Clock()
    _, entry = new_key("web", requests_per_second=1, burst_seconds=1)
    key, other = new_key("other")
    ring = ring_of(path, entry, other, clock=clock)
    ring.charge("web", 1)
    path.write_text(other + entry, encoding="utf-8")
    ring.authenticate(bearer(key))
    with pytest.raises(ExhaustedError):
        ring.charge("web", 1)
    for index in range(20):
        _, entry = new_key(f"web-{index}", requests_per_second=1, characters_per_second=1)
        path.write_text(other + entry, encoding="utf-8")
        ring.authenticate(bearer(key))
        ring.charge(f"web-{index}", 1)
    assert len(ring._buckets) == 2


RATES = st.builds(Rate, st.floats(0.01, 1e6), st.floats(0.01, 100))
CALLS = st.lists(st.tuples(st.integers(0, 10 * SECOND), st.floats(0, 3)), min_size=1, max_size=40)
"""Time since the call before, in nanoseconds, and size as a share of the burst."""


@settings(max_examples=200, deadline=None)
@given(rate=RATES, calls=CALLS)
def test_no_window_ever_gets_more_than_its_share(rate: Rate, calls: list[tuple[int, float]]) -> None:
    bucket, now_ns = TokenBucket(), SECOND
    burst = rate.per_second * rate.burst_seconds
    admitted: list[tuple[int, int]] = []
    for gap_ns, share in calls:
        now_ns += gap_ns
        units = int(share * burst)
        if bucket.wait_ns(rate, units, now_ns) == 0:
            bucket.take(rate, units, now_ns)
            admitted.append((now_ns, units))
    for first in range(len(admitted)):
        for last in range(first, len(admitted)):
            window = admitted[first : last + 1]
            seconds = (window[-1][0] - window[0][0]) / 1e9
            most = max(burst, *(units for _, units in window))
            assert sum(units for _, units in window) <= (rate.per_second * seconds + most) * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(rate=RATES, calls=CALLS)
def test_whoever_waits_as_told_gets_in_and_not_a_nanosecond_before(rate: Rate, calls: list[tuple[int, float]]) -> None:
    bucket, now_ns = TokenBucket(), SECOND
    for gap_ns, share in calls:
        now_ns += gap_ns
        units = int(share * rate.per_second * rate.burst_seconds)
        wait_ns = bucket.wait_ns(rate, units, now_ns)
        if wait_ns:
            assert bucket.wait_ns(rate, units, now_ns + wait_ns - 1) == 1
        now_ns += wait_ns
        assert bucket.wait_ns(rate, units, now_ns) == 0
        bucket.take(rate, units, now_ns)


@settings(max_examples=200, deadline=None)
@given(rate=RATES, share=st.floats(0.01, 3), count=st.integers(1, 50))
def test_nobody_starves(rate: Rate, share: float, count: int) -> None:
    """A caller that always comes back when told to gets its whole rate, whatever the size of its requests."""
    bucket, begun_ns, now_ns = TokenBucket(), SECOND, SECOND
    units = max(1, int(share * rate.per_second * rate.burst_seconds))
    for _ in range(count):
        now_ns += bucket.wait_ns(rate, units, now_ns)
        bucket.take(rate, units, now_ns)
    assert now_ns - begun_ns <= (count - 1) * rate.cost_ns(units)


def test_a_request_larger_than_the_allowance_goes_into_debt() -> None:
    rate, bucket = Rate(per_second=10, burst_seconds=2), TokenBucket()
    bucket.take(rate, 100, now_ns=0)  # ten seconds' worth
    assert bucket.wait_ns(rate, 1, now_ns=0) == 8 * SECOND + SECOND // 10
    assert bucket.wait_ns(rate, 100, now_ns=0) == 10 * SECOND


def test_a_certificate_names_its_holder() -> None:
    context = {"transport_security_type": [b"ssl"], "x509_common_name": [b"web"]}
    caller = caller_from_auth_context(context)
    assert caller is not None
    assert (caller.name, set(caller.rights)) == ("web", {"translate"})
    assert caller_from_auth_context({"transport_security_type": [b"ssl"]}) is None, "TLS without a client certificate"
    assert caller_from_auth_context({"x509_common_name": [b"web"]}) is None, "a name that TLS has not checked"
    assert caller_from_auth_context({}) is None


class FakeContext:
    def __init__(self, metadata: Any = (), auth: Any = None) -> None:
        self.invocation_metadata = lambda: metadata
        self.auth_context = lambda: auth or {}


def test_gates_say_it_in_statuses(path: Path) -> None:
    key, entry = new_key("web", requests_per_second=1, burst_seconds=1)
    gate = KeyGate(ring_of(path, entry))
    context: Any = FakeContext(bearer(key))
    assert gate.admit(TRANSLATE, context) == "web"
    with pytest.raises(NotAllowedError):
        gate.admit(LOAD, context)
    for metadata in ([], bearer("dgm_wrong")):
        nobody: Any = FakeContext(metadata)
        with pytest.raises(UnauthenticatedError):
            gate.admit(TRANSLATE, nobody)
    gate.charge("web", 5)
    with pytest.raises(RateLimitedError) as caught:
        gate.charge("web", 5)
    assert (caught.value.retry_after_s, caught.value.quota) == (1.0, "requests_per_second")
    certified: Any = FakeContext(auth={"transport_security_type": [b"ssl"], "x509_common_name": [b"web"]})
    assert CertificateGate().admit(TRANSLATE, certified) == "web"
    with pytest.raises(NotAllowedError):
        CertificateGate().admit(LOAD, certified)
    with pytest.raises(UnauthenticatedError):
        CertificateGate().admit(TRANSLATE, context)


def test_the_command_shows_the_key_once_and_writes_only_its_hash(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "new-key --name web --right translate --right admin --requests-per-second 50 --burst-seconds 2"
    assert main(arguments.split()) == 0
    printed = capsys.readouterr()
    key = printed.err.strip().rpartition(" ")[2]
    assert key.startswith("dgm_")
    assert key not in printed.out
    path.write_text(printed.out, encoding="utf-8")
    [caller] = read_keys(path).values()
    assert (caller.name, set(caller.rights)) == ("web", {"translate", "admin"})
    assert caller.rates == {"requests_per_second": Rate(50.0, 2.0)}
    [entry] = tomllib.loads(printed.out)["keys"]
    assert entry["sha256"] == hashlib.sha256(key.encode()).hexdigest()
    assert main(["new-key", "--name", 'w"\n[[keys]]']) == 2
    assert "name must be" in capsys.readouterr().err
    assert main(["new-key", "--name", "web", "--requests-per-second", "nan"]) == 2
