"""The options of a secure connection, the same for every command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dragoman_client.credentials import Security


def _option(variable: str, help_text: str) -> Any:
    return typer.Option(envvar=variable, help=help_text, rich_help_panel="Security", show_default=False)


_Tls = Annotated[bool | None, _option("DRAGOMAN_TLS", "Encrypt. Without either: if a certificate is given.")]
_CaCertificate = Annotated[
    Path | None,
    _option("DRAGOMAN_CA_CERTIFICATE", "PEM file: who may have signed the server's certificate. Without: gRPC's list."),
]
_ClientCertificate = Annotated[Path | None, _option("DRAGOMAN_CLIENT_CERTIFICATE", "PEM file, for mutual TLS.")]
_ClientKey = Annotated[Path | None, _option("DRAGOMAN_CLIENT_KEY", "PEM file, the certificate's key.")]
_ApiKey = Annotated[
    str | None,
    _option("DRAGOMAN_API_KEY", "Better in the variable or in a file: everybody on a machine can read command lines."),
]
_ApiKeyFile = Annotated[Path | None, _option("DRAGOMAN_API_KEY_FILE", "File with the API key.")]
_AllowPlaintextKey = Annotated[
    bool,
    typer.Option(
        "--allow-plaintext-key", help="Send the key to other machines without TLS too.", rich_help_panel="Security"
    ),
]


def security_options(
    tls: _Tls = None,
    ca_certificate: _CaCertificate = None,
    client_certificate: _ClientCertificate = None,
    client_key: _ClientKey = None,
    api_key: _ApiKey = None,
    api_key_file: _ApiKeyFile = None,
    allow_plaintext_key: _AllowPlaintextKey = False,
) -> Security:
    """What the options say.

    Raises:
        typer.BadParameter: there are two keys.
        OSError: the file with the key cannot be read.
    """
    if api_key and api_key_file:
        raise typer.BadParameter("there are two keys: use DRAGOMAN_API_KEY or --api-key-file, not both")
    key = api_key_file.read_text(encoding="utf-8").strip() if api_key_file else api_key or None
    return Security(
        tls=tls,
        ca_certificate=ca_certificate,
        client_certificate=client_certificate,
        client_key=client_key,
        api_key=key,
        allow_plaintext_key=allow_plaintext_key,
    )


def secured(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command these options too; it gets what they say as its keyword argument `security`."""
    own = inspect.signature(command, eval_str=True).parameters
    added = inspect.signature(security_options, eval_str=True).parameters
    shown = [parameter for name, parameter in own.items() if name != "security"] + list(added.values())

    @functools.wraps(command)
    def call(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in added}
        command(**arguments, security=security_options(**given))

    # Typer makes a command's options from these two.
    call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return call
