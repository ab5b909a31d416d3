"""The command line: ``pgmesh`` and ``python -m pgmesh`` are the same.

It ends with 0, with 1 where a check failed, and with 2 where the command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence

from pgmesh.cli.arguments import CommandLine, UsageError
from pgmesh.errors import PgmeshError

COMMANDS = {
    "plan": "groups, where they lie on hosts, what they would cost, what is bad about it",
    "show": "one rank: its place, its groups, its neighbours, a picture",
    "check": "the preflight of a job: all its ranks come, connect, sum rightly, are measured",
    "doctor": "launcher, torch, network and store, as this process finds them; what to do",
}
"""Each is a file of ``pgmesh.cli``: ``add`` says what it takes, ``EXAMPLES`` ends its help, and ``run`` does it
and returns the exit status."""

ABOUT = "Arrange the ranks of a torch.distributed job in an N-D mesh, and see what that would be like."


def main(argv: Sequence[str] | None = None) -> int:
    """Do what a command line says; its exit status."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)  # torch's, where it is missing
    words = tuple(sys.argv[1:] if argv is None else argv)
    parser = _parser(words)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(words)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a frame that a terminal cannot draw is no reason to fail
    command = importlib.import_module(f"pgmesh.cli.{args.command}")
    try:
        return int(command.run(args, CommandLine(words)))
    except (UsageError, PgmeshError) as error:
        print(f"pgmesh {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """What may be said. Only the command that is asked for is loaded."""
    parser = argparse.ArgumentParser(prog="pgmesh", description=ABOUT)
    version = importlib.import_module("pgmesh").__version__
    parser.add_argument("--version", action="version", version=f"pgmesh {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, says in COMMANDS.items():
        own = commands.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.")
        if name in words[:1]:
            command = importlib.import_module(f"pgmesh.cli.{name}")
            own.epilog, own.formatter_class = command.EXAMPLES, argparse.RawDescriptionHelpFormatter
            command.add(own)
    return parser


if __name__ == "__main__":
    sys.exit(main())
