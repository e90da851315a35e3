"""The command `dragoman`: translate from a terminal or a script."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeRemainingColumn

from dragoman_client import admin_commands
from dragoman_client.aio import DEFAULT_SERVER, DEFAULT_TIMEOUT_S, AsyncClient
from dragoman_client.credentials import CredentialsError, Security
from dragoman_client.errors import DragomanError
from dragoman_client.lines import LineOptions, LineTranslator
from dragoman_client.security_options import secured
from dragoman_client.types import BeamSearch, DecodingOptions, ModelDescription

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Translate with a Dragoman server.",
)
app.add_typer(admin_commands.app, name="admin")
_Server = Annotated[str, typer.Option(envvar="DRAGOMAN_SERVER", help="HOST:PORT of the server.")]
_Timeout = Annotated[float, typer.Option(help="Of each call, in seconds.", min=0.001)]
_Text = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts. Without: --input, or stdin.")]
_Input = Annotated[Path | None, typer.Option(help="UTF-8 file, one text a line.", exists=True, dir_okay=False)]
_Output = Annotated[Path | None, typer.Option(help="File for the translations, one a line. Without: stdout.")]


class InputError(Exception):
    """Input that cannot be read as text."""


@app.command()
@secured
def translate(
    source: Annotated[str, typer.Option(help="Language of the text, such as zh.")],
    target: Annotated[str, typer.Option(help="Language to translate into, such as en.")],
    text: _Text = None,
    server: _Server = DEFAULT_SERVER,
    input: _Input = None,  # noqa: A002 - the flag's name
    output: _Output = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with all the server says.")] = False,
    model: Annotated[str, typer.Option(help="NAME or NAME@VERSION. Without: whichever translates the pair.")] = "",
    concurrency: Annotated[int, typer.Option(help="Texts in flight at once.", min=1)] = 64,
    timeout: _Timeout = DEFAULT_TIMEOUT_S,
    beam: Annotated[int, typer.Option(help="Width of the beam; 1 is greedy.", min=1)] = 1,
    length_penalty: Annotated[float, typer.Option(help="Of beam search; 0 does not normalise.", min=0)] = 1.0,
    hypotheses: Annotated[int, typer.Option(help="Translations of each text, with --json; needs --beam.", min=1)] = 1,
    scores: Annotated[bool, typer.Option("--scores", help="Scores and token log-probabilities, with --json.")] = False,
    alignment: Annotated[bool, typer.Option("--alignment", help="Where each token comes from, with --json.")] = False,
    split: Annotated[bool, typer.Option(help="Let the server cut texts into sentences.")] = True,
    bulk: Annotated[bool, typer.Option("--bulk", help="Use only what interactive callers leave idle.")] = False,
    *,
    security: Security,
) -> None:
    """Translate texts, or a file or stdin line by line: one line in, one line out, in order.

    An empty line stays empty. A line that cannot be translated leaves an empty line, is reported with its number, and
    makes the exit code 1.
    """
    if text and input:
        raise typer.BadParameter("give TEXT or --input, not both")
    if input and output and output.exists() and output.samefile(input):
        raise typer.BadParameter("--output is the --input file, which would be lost; choose another")
    decoding = DecodingOptions(
        search=BeamSearch(width=beam, length_penalty=length_penalty) if beam > 1 else None,
        num_hypotheses=hypotheses,
        return_scores=scores,
        return_tokens=scores,
        return_alignment=alignment,
    )
    options = LineOptions(
        source=source,
        target=target,
        model=model,
        concurrency=concurrency,
        as_json=json,
        decoding=decoding,
        split=split,
        priority="bulk" if bulk else "interactive",
    )
    with ExitStack() as files:
        lines = text or _read_lines(files.enter_context(_open_input(input)))
        sink = files.enter_context(output.open("w", encoding="utf-8")) if output else sys.stdout
        total = len(text) if text else _count_lines(input) if input else None
        num_failed = asyncio.run(_translate_lines(lines, total, sink, options, server, timeout, security))
    if num_failed:
        raise typer.Exit(1)


async def _translate_lines(
    lines: Iterable[str],
    total: int | None,
    sink: TextIO,
    options: LineOptions,
    server: str,
    timeout: float,
    security: Security,
) -> int:
    console = Console(stderr=True)
    # On a terminal the translations themselves show how far it is.
    hidden = not console.is_terminal or sink.isatty()
    columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    async with AsyncClient(server, timeout, **security) as client:
        with Progress(*columns, console=console, disable=hidden) as progress:
            task = progress.add_task("", total=total)
            return await LineTranslator(client, options, sink, _complain, lambda: progress.advance(task)).run(lines)


def _open_input(path: Path | None) -> TextIO:
    if path is not None:
        return path.open(encoding="utf-8", newline="\n")
    # A duplicate, so that closing it leaves the process's stdin alone.
    return open(sys.stdin.fileno(), encoding="utf-8", newline="\n", closefd=False)


def _read_lines(file: TextIO) -> Iterator[str]:
    try:
        for line in file:
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(f"the input is not UTF-8: {error}") from error


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


@app.command()
@secured
def models(server: _Server = DEFAULT_SERVER, timeout: _Timeout = DEFAULT_TIMEOUT_S, *, security: Security) -> None:
    """List the models that a server offers."""
    for model in asyncio.run(_list_models(server, timeout, security)):
        pairs = ", ".join(f"{source}→{target}" for source, target in model.directions)
        facts = [f"version {model.version}", pairs, f"{model.device}-{model.precision}", *model.labels]
        typer.echo("\t".join([model.name, *facts]))


@app.command()
@secured
def stream(
    text: Annotated[str, typer.Argument(help="What to translate.")],
    source: Annotated[str, typer.Option(help="Language of the text, such as zh.")],
    target: Annotated[str, typer.Option(help="Language to translate into, such as en.")],
    server: _Server = DEFAULT_SERVER,
    model: Annotated[str, typer.Option(help="NAME or NAME@VERSION. Without: whichever translates the pair.")] = "",
    beam: Annotated[int, typer.Option(help="Width of the beam; 1 is greedy.", min=1)] = 1,
    timeout: _Timeout = DEFAULT_TIMEOUT_S,
    *,
    security: Security,
) -> None:
    """Translate one text and print it as it becomes certain."""
    decoding = DecodingOptions(search=BeamSearch(width=beam) if beam > 1 else None)
    asyncio.run(_stream(text, source, target, server, model, decoding, timeout, security))


async def _stream(
    text: str,
    source: str,
    target: str,
    server: str,
    model: str,
    decoding: DecodingOptions,
    timeout: float,
    security: Security,
) -> None:
    async with AsyncClient(server, timeout, **security) as client:
        async for event in client.stream(text, source=source, target=target, model=model, options=decoding):
            if isinstance(event, str):
                sys.stdout.write(event)
                sys.stdout.flush()
    sys.stdout.write("\n")


async def _list_models(server: str, timeout: float, security: Security) -> list[ModelDescription]:
    async with AsyncClient(server, timeout, **security) as client:
        return await client.models()


_LOAD_HELP = """Measure a server's latency under load, with texts drawn from a file and so with its mix of lengths.

Give one of --rate, --concurrency and --find-knee.

--rate: requests are sent at moments drawn ahead of time, however slow the server is, and latency counts from those
moments, not from when a request could be sent: a server that stalls cannot hide it (Gil Tene calls what this avoids
coordinated omission).

--concurrency: a caller that waits does not send, so each stall is counted once per caller instead of once per
request that would have come. Both are reported: the latency "from sending", as the callers saw it, and the
"corrected" one, which adds the requests that each caller would have sent meanwhile at its median pace.

--find-knee: doubles the rate until p99 exceeds --slo-ms, less than 95 % of the offered rate is answered, or more
than 0.1 % of the requests fail; then bisects to within 5 %.

Exit code 1 means that requests failed, that no rate held, or that the server cannot be reached.
"""


@app.command(help=_LOAD_HELP)
@secured
def load(
    source: Annotated[str, typer.Option(help="Language of the texts, such as zh. Required.")] = "",
    target: Annotated[str, typer.Option(help="Language to translate into, such as en. Required.")] = "",
    input: Annotated[Path | None, typer.Option(help="UTF-8 file, one text a line. Required.")] = None,  # noqa: A002
    server: _Server = DEFAULT_SERVER,
    model: Annotated[str, typer.Option(help="NAME or NAME@VERSION. Without: whichever translates the pair.")] = "",
    rate: Annotated[float | None, typer.Option(help="Open loop: Poisson arrivals, so many requests/s.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Closed loop: so many callers back to back.")] = None,
    find_knee: Annotated[
        bool, typer.Option("--find-knee", help="Search the highest rate that meets --slo-ms.")
    ] = False,
    slo_ms: Annotated[float | None, typer.Option(help="Bound on p99, in ms; --find-knee without it: 300.")] = None,
    start_rate: Annotated[float | None, typer.Option(help="Where --find-knee begins; without it: 16.")] = None,
    duration: Annotated[float, typer.Option(help="Of the measured window, in seconds; per rate in a search.")] = 30.0,
    warmup: Annotated[float, typer.Option(help="Before each window, in seconds; 0 is off.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and texts.")] = 0,
    priority: Annotated[
        str, typer.Option(metavar="interactive|bulk", help="Of the measured requests.")
    ] = "interactive",
    bulk_concurrency: Annotated[int, typer.Option(help="Callers of bulk traffic in the background; 0 is off.")] = 0,
    beam: Annotated[int, typer.Option(help="Width of the beam; 1 is greedy.")] = 1,
    split: Annotated[bool, typer.Option(help="Let the server cut texts into sentences.")] = True,
    timeout: Annotated[float, typer.Option(help="Of each request, in seconds.")] = DEFAULT_TIMEOUT_S,
    json: Annotated[Path | None, typer.Option(help="File for the whole result as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a picture, .png or .svg; needs dragoman\\[load].")] = None,
    *,
    security: Security,
) -> None:
    """Measure a server under load."""
    from dragoman_client.load.command import load_command
    from dragoman_client.load.options import LoadArguments

    arguments = LoadArguments(
        source=source,
        target=target,
        input=input,
        server=server,
        model=model,
        rate=rate,
        concurrency=concurrency,
        find_knee=find_knee,
        slo_ms=slo_ms,
        start_rate=start_rate,
        duration=duration,
        warmup=warmup,
        seed=seed,
        priority=priority,
        bulk_concurrency=bulk_concurrency,
        beam=beam,
        split=split,
        timeout=timeout,
        json=json,
        plot=plot,
        security=security,
    )
    raise typer.Exit(load_command(arguments, _complain))


def _complain(message: str) -> None:
    typer.echo(message, err=True)


def main() -> None:
    """Run the command line: exit code 0, 1 if it failed, 2 if it was called wrongly."""
    try:
        app()
    except CredentialsError as error:
        _complain(f"error: {error}")
        sys.exit(2)
    except (DragomanError, InputError, OSError) as error:
        _complain(f"error: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
