"""``pgmesh report``: where each rank of a running job is, read from its store."""

from __future__ import annotations

import argparse

from pgmesh.cli import arguments
from pgmesh.cli.arguments import UsageError

EXAMPLES = """\
examples:
  python -m pgmesh report node0:29500
  python -m pgmesh report $MASTER_ADDR:$MASTER_PORT   # as a rank has them

A rank has a status from its first connect, report or abort_when_lost on. With
PGMESH_REPORT=1 in its environment, it has one from pgmesh.launch.join on."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="HOST:PORT", help="the job's MASTER_ADDR and MASTER_PORT")
    arguments.add_timeout(parser, 15.0, "timeout of the whole command")


def run(args: argparse.Namespace) -> int:
    from pgmesh.report.remote import report_at  # here, so that only this command's run imports torch

    host, _, port = args.store.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"{args.store!r} is not HOST:PORT, as in node0:29500.")
    print(report_at(host.strip("[]"), int(port), args.timeout))
    return 0
