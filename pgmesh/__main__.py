"""The command line: ``pgmesh``, or ``python -m pgmesh``.

The exit status is 0 for success, 1 if a check failed, and 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence

from pgmesh.cli.arguments import UsageError
from pgmesh.errors import PgmeshError

COMMANDS = {
    "plan": "predict the groups of a mesh, their hosts and problems",
    "show": "show one rank: its coord, its groups, its neighbours, a figure",
    "check": "check a job before it runs: its ranks join, connect, reduce, are measured",
    "report": "where each rank of a running job is, who has ended, who is behind",
    "doctor": "diagnose launcher, torch, network and store of this process, with fixes",
}
"""The commands with their help. Each is a module of ``pgmesh.cli``: ``add`` declares its arguments, ``EXAMPLES`` is the
end of its help, and ``run`` executes it and returns the exit status."""

ABOUT = "Plan and check the arrangement of a torch.distributed job's ranks in an N-D mesh."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)  # torch warns so if numpy is missing
    words = tuple(sys.argv[1:] if argv is None else argv)
    parser = _parser(words)
    args = parser.parse_args(words)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal that cannot display frames
    command = importlib.import_module(f"pgmesh.cli.{args.command}")
    try:
        return int(command.run(args))
    except (UsageError, PgmeshError) as error:
        print(f"pgmesh {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader closed the pipe early, as ``head`` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser. Only the module of the requested command is imported."""
    parser = argparse.ArgumentParser(prog="pgmesh", description=ABOUT)
    version = importlib.import_module("pgmesh").__version__
    parser.add_argument("--version", action="version", version=f"pgmesh {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, text in COMMANDS.items():
        description = f"{text[0].upper()}{text[1:]}."
        command_parser = commands.add_parser(name, help=text, description=description)
        if name in words[:1]:
            command = importlib.import_module(f"pgmesh.cli.{name}")
            command_parser.epilog = command.EXAMPLES
            command_parser.formatter_class = argparse.RawDescriptionHelpFormatter
            command.add(command_parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
