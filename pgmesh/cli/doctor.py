"""``pgmesh doctor``: a diagnosis of the environment of one process, without joining a world."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

from pgmesh.cli import arguments, output
from pgmesh.cli.arguments import UsageError
from pgmesh.drawing import styled_text
from pgmesh.drawing.styled_text import Line

EXAMPLES = """\
examples:
  pgmesh doctor
  srun -n 8 python -m pgmesh doctor

Nothing is sent to other ranks. Exit status 1 if a finding is bad."""


def add(parser: argparse.ArgumentParser) -> None:
    text = "timeout of each network operation (3)"
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help=text)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.timeout <= 0:
        raise UsageError("--timeout has to be greater than 0.", ("pgmesh doctor", "waits 3 s"))
    from pgmesh.preflight.diagnosis import diagnose

    findings = diagnose(os.environ, args.timeout)
    bad = any(finding.mark == "bad" for finding in findings)
    data = {"format": 1, "status": "bad" if bad else "ok", "findings": [asdict(finding) for finding in findings]}

    def lines(width: int) -> list[Line]:
        lines: list[Line] = []
        for finding in findings:
            lines += styled_text.marked(finding.mark, f"{finding.what}: {finding.text}", width)
            for fix in finding.fix.splitlines():
                lines += styled_text.wrapped(fix, width, "bold", " " * 8) if fix.strip() else [[]]
        return lines

    output.report(args, lambda: data, lines)
    return int(bad)
