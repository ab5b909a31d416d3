"""Each row of docs/faults.md has a test, and each marker of a test names a row."""

from __future__ import annotations

import pytest

from tests.support.fault_table import faults, marked_tests


@pytest.mark.parametrize("fault", faults())
def test_each_fault_has_a_test(fault: str):
    assert marked_tests().get(fault), f'mark a test with @pytest.mark.fault("{fault}")'


def test_each_marker_names_a_fault():
    assert marked_tests().keys() - {*faults()} == set()
