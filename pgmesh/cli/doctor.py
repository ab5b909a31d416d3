"""``pgmesh doctor``: a diagnosis of the environment of one process, without joining a world."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

from pgmesh.cli import arguments, output
from pgmesh.drawing import styled_text
from pgmesh.drawing.styled_text import Line
from pgmesh.preflight.diagnosis import Finding, diagnose

EXAMPLES = """\
examples:
  pgmesh doctor
  srun -n 8 python -m pgmesh doctor

Nothing is sent to other ranks. Exit status 1 if a finding is bad."""


def add(parser: argparse.ArgumentParser) -> None:
    arguments.add_timeout(parser, 3.0, "timeout of each network operation")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    findings = diagnose(os.environ, args.timeout)
    is_bad = any(finding.mark == "bad" for finding in findings)
    data = {"format": 1, "status": "bad" if is_bad else "ok", "findings": [asdict(finding) for finding in findings]}
    output.report(args, lambda: data, lambda width: _lines(findings, width))
    return int(is_bad)


def _lines(findings: list[Finding], width: int) -> list[Line]:
    lines: list[Line] = []
    for finding in findings:
        lines += styled_text.marked(finding.mark, f"{finding.what}: {finding.text}", width)
        lines += [[(f"{' ' * 8}{fix.strip()}", "bold")] for fix in finding.fix.splitlines()]  # whole, to be pasted
    return lines
