"""A pytest plugin which asserts that the tests run on the torch that `make test-torch` asked for.

Installing a tool may replace torch by another version. Then no test may pass.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator

import pytest
import torch


def check(wanted: str) -> None:
    """Raise unless this torch is the wanted one, of any build: 2.15.0+cu132 is 2.15.0."""
    found = str(torch.__version__)
    if wanted not in (found, found.partition("+")[0]):
        raise pytest.UsageError(f"this is torch {found} in {sys.prefix}, and not torch {wanted}, which was asked for.")


REFUSALS = (
    "a pipeline needs the stages of torch 2.12",
    "torch 2.9 cannot list the keys of a store",
    "fully_shard does not support containers",  # experts of a list
    "FSDP requires the DP and model parallel TP/EP mesh to have the same parent mesh",
    "Invalid mesh_dim_names",  # of FSDP, as above
)
"""What docs/versions.md says of torches before 2.12, in the words of errors. A test that meets one is skipped there."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    text = report.longreprtext + report.capstdout + report.capstderr
    is_old = torch.torch_version.TorchVersion(torch.__version__) < (2, 12)
    if is_old and report.failed and (found := [refusal for refusal in REFUSALS if refusal in text]):
        report.outcome, report.longrepr = "skipped", (str(item.path), item.reportinfo()[1] or 0, found[0])
    return report


def pytest_configure(config: pytest.Config) -> None:
    check(os.environ["PGMESH_TORCH"])


if __name__ == "__main__":
    try:
        check(sys.argv[1])
    except pytest.UsageError as error:
        sys.exit(str(error))
    print(f"torch {torch.__version__}")
