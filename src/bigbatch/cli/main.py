"""The command ``bigbatch``. Nothing here loads torch, so that ``--help`` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from bigbatch.cli.bench import bench
from bigbatch.cli.plan import plan
from bigbatch.cli.speaking import tell
from bigbatch.cli.train import train
from bigbatch.cli.verify import verify
from bigbatch.errors import BigBatchError, DeviceError

app = typer.Typer(
    name="bigbatch",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(train)
app.command()(plan)
app.command()(verify)
app.command()(bench)


def _print_version(asked: bool) -> None:
    if asked:
        from bigbatch import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _bigbatch(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train with the batch you want on the memory you have."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; what is wrong is told in a message, without a traceback when it is ours.

    Args:
        arguments: Without the name of the program; None: those of this process.

    Returns:
        0: all is well; 1: an error, or a check that failed; 2: the command line itself is wrong.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(args=given, prog_name="bigbatch", obj=given)  # a command that starts ranks gives them the same arguments
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except BigBatchError as error:
        tell(error)
        return 2 if isinstance(error, DeviceError) else 1
    return 0
