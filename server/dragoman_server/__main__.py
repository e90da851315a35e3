"""The command `dragoman-server`."""

from __future__ import annotations

import asyncio
import logging
import sys

from pydantic import ValidationError

from dragoman_server.grpc_server import Server
from dragoman_server.repository import RepositoryError
from dragoman_server.settings import ServerSettings


def main() -> None:
    """Run the server; exit code 0 after a stop, 1 if it failed, 2 if it was called wrongly."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = ServerSettings(_cli_parse_args=True)  # type: ignore[call-arg]
    except ValidationError as error:
        problems = [f"- --{str(e['loc'][0]).replace('_', '-')}: {e['msg']}" for e in error.errors()]
        sys.exit(_complain("\n".join(["these settings are not valid:", *problems]), 2))
    try:
        sys.exit(asyncio.run(_serve(settings)))
    except (RepositoryError, OSError, RuntimeError) as error:
        sys.exit(_complain(str(error), 1))


async def _serve(settings: ServerSettings) -> int:
    return await Server(settings).run()


def _complain(message: str, exit_code: int) -> int:
    sys.stderr.write(f"dragoman-server: {message}\n")
    return exit_code


if __name__ == "__main__":
    main()
