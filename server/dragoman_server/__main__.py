"""The command `dragoman-server`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

from pydantic import ValidationError
from pydantic_settings import SettingsError

from dragoman_server import access, logs
from dragoman_server.grpc_server import Server
from dragoman_server.repository import RepositoryError
from dragoman_server.settings import ServerSettings
from dragoman_server.watched_files import RefusedFileError


def main() -> None:
    """Run the server; exit code 0 after a stop, 1 if it failed, 2 if it was called wrongly."""
    if sys.argv[1:2] == ["keys"]:
        sys.exit(access.main(sys.argv[2:]))
    try:
        settings = ServerSettings.load(sys.argv[1:])
    except ValidationError as error:
        sys.exit(_complain("\n".join(["these settings are not valid:", *_problems(error)]), 2))
    except (SettingsError, OSError, ValueError) as error:
        sys.exit(_complain(str(error), 2))
    if settings.print_config:
        sys.stdout.write(settings.to_toml())
        return
    logs.configure(settings.log_format, settings.log_level)
    try:
        sys.exit(asyncio.run(_serve(settings)))
    except (RepositoryError, RefusedFileError, OSError, RuntimeError, ImportError) as error:
        sys.exit(_complain(str(error), 1))


async def _serve(settings: ServerSettings) -> int:
    return await Server(settings).run()


def _problems(error: ValidationError) -> Iterator[str]:
    for found in error.errors():
        flag = f"--{str(found['loc'][0]).replace('_', '-')}: " if found["loc"] else ""
        yield f"- {flag}{found['msg'].removeprefix('Value error, ')}"


def _complain(message: str, exit_code: int) -> int:
    sys.stderr.write(f"dragoman-server: {message}\n")
    return exit_code


if __name__ == "__main__":
    main()
