from __future__ import annotations

import pytest

from dragoman_server.exposure import exposures

EVERYWHERE = "0.0.0.0"  # noqa: S104 - what is warned of


def found(host: str, *settings: str) -> str:
    names = ("tls", "client_ca", "keys")
    return " | ".join(exposures(host, **{f"has_{name}": name in settings for name in names}))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "unix:/run/dragoman.sock"])
def test_a_server_for_its_own_machine_is_open_on_purpose(host: str) -> None:
    assert found(host) == ""


@pytest.mark.parametrize("host", [EVERYWHERE, "::", "[::]", "10.0.0.1", "mt.example.com", ""])
def test_a_server_for_others_says_what_it_leaves_open(host: str) -> None:
    assert "set --tls-certificate | " in found(host)
    assert "may translate" in found(host)


def test_every_setting_closes_what_it_is_for() -> None:
    assert "texts and keys travel unencrypted" in found(EVERYWHERE, "keys")
    assert "may translate" not in found(EVERYWHERE, "keys")
    assert found(EVERYWHERE, "tls", "keys") == ""
    assert found(EVERYWHERE, "tls", "client_ca") == ""
