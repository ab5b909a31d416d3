"""A pytest plugin which asserts that the tests run on the torch that `make test-torch` asked for.

Installing a tool may replace torch by another version. Then no test may pass.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch


def check(wanted: str) -> None:
    """Raise unless this torch is the wanted one, of any build: 2.15.0+cu132 is 2.15.0."""
    found = str(torch.__version__)
    if wanted not in (found, found.partition("+")[0]):
        raise pytest.UsageError(f"this is torch {found} in {sys.prefix}, and not torch {wanted}, which was asked for.")


def pytest_configure(config: pytest.Config) -> None:
    check(os.environ["PGMESH_TORCH"])


if __name__ == "__main__":
    try:
        check(sys.argv[1])
    except pytest.UsageError as error:
        sys.exit(str(error))
    print(f"torch {torch.__version__}")
