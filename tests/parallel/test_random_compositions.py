"""Twelve of the compositions that ``make chaos`` draws at random."""

from __future__ import annotations

import pytest

from tests.parallel.random_compositions import run_all

pytestmark = pytest.mark.long


def test_complete_compositions_train_and_others_are_refused():
    lines: list[str] = []
    results = run_all([*range(12)], lines.append)
    report = "\n".join(lines)
    assert [each.kind for each in results] == ["refused" if each.drawn.omission else "trains" for each in results], (
        report
    )
    assert sum(not each.drawn.omission for each in results) >= 9, report
