"""The commands `dragoman admin ...`: change what a server serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from dragoman_client.admin import AsyncAdmin
from dragoman_client.aio import DEFAULT_SERVER, AsyncClient
from dragoman_client.credentials import Security
from dragoman_client.security_options import secured

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, help="Load, unload and route models; the server must run with --admin.")

_Server = Annotated[str, typer.Option(envvar="DRAGOMAN_SERVER", help="HOST:PORT of the server.")]
_Name = Annotated[str, typer.Argument(help="Of the model.")]


@app.command("list")
@secured
def list_repository(server: _Server = DEFAULT_SERVER, *, security: Security) -> None:
    """List the versions in the server's repository."""
    for entry in _run(server, security, lambda admin: admin.repository()):
        typer.echo(f"{entry.name}\tversion {entry.version}\t{'loaded' if entry.is_loaded else 'not loaded'}")


@app.command()
@secured
def load(
    name: _Name,
    version: Annotated[str, typer.Argument(help="Without: the newest in the repository.")] = "",
    stable: Annotated[bool, typer.Option("--stable", help="Send calls to it as soon as it is ready.")] = False,
    server: _Server = DEFAULT_SERVER,
    *,
    security: Security,
) -> None:
    """Load a version beside those that are loaded."""
    model = _run(server, security, lambda admin: admin.load(name, version, make_stable=stable))
    typer.echo(f"{model.name} version {model.version} is loaded and gets {model.traffic_share:.0%} of the calls")


@app.command()
@secured
def unload(
    name: _Name,
    version: Annotated[str, typer.Argument(help="A loaded one, not the stable one unless it is the last.")],
    server: _Server = DEFAULT_SERVER,
    *,
    security: Security,
) -> None:
    """Take a version out, once the calls that it works on are answered."""
    _run(server, security, lambda admin: admin.unload(name, version))


@app.command()
@secured
def route(
    name: _Name,
    stable: Annotated[str, typer.Option(help="Version for calls that name none.")],
    canary: Annotated[str, typer.Option(help="Another version, for a share of them.")] = "",
    canary_share: Annotated[float, typer.Option(help="That share, 0 to 1.", min=0, max=1)] = 0.0,
    server: _Server = DEFAULT_SERVER,
    *,
    security: Security,
) -> None:
    """Say which versions the calls go to that name none."""
    _run(server, security, lambda admin: admin.route(name, stable=stable, canary=canary, canary_share=canary_share))


def _run(server: str, security: Security, work: Callable[[AsyncAdmin], Awaitable[T]]) -> T:
    async def connected() -> T:
        async with AsyncClient(server, **security) as client:
            return await work(client.admin)

    return asyncio.run(connected())
