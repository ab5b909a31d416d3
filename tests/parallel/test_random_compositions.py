"""Twenty of the compositions that ``make chaos`` draws at random."""

from __future__ import annotations

import pytest

from tests.parallel.random_compositions import run_all

pytestmark = pytest.mark.long


def test_compositions_drawn_at_random_train_or_are_refused():
    lines: list[str] = []
    kinds = [result.kind for result in run_all([*range(20)], lines.append)]
    report = "\n".join(lines)
    assert "WRONG" not in kinds, report
    assert kinds.count("trains") >= 16, report
