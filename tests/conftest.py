"""How the tests run: Hypothesis tries the same examples each time, and no worker is left alone with a long file."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import settings

from pgmesh.rendezvous.store_thread import Heart

LONGEST = (
    "test_faults",
    "test_model",
    "test_check",
    "test_laws",
    "test_launch",
    "test_pictures",
    "test_groups",
    "test_recipes",
    "test_hazards",
    "test_lifetime",
    "test_ledger",
    "test_worlds",
    "test_device_mesh",
    "test_command_line",
    "test_mesh",
    "test_readme",
    "test_parallel_base",
    "test_promptness",
    "test_counts",
    "test_megatron_core",
    "test_connect",
)
"""The files that take longest, longest first: those that wait by turns with those that compute."""


@pytest.fixture
def heart() -> Iterator[Heart]:
    """The thread that asks, over a store in memory."""
    beating = Heart(dist.HashStore(), "nowhere", 0, 1)
    yield beating
    beating.stop()


def pytest_configure(config: pytest.Config) -> None:
    fixed = config.getoption("hypothesis_seed") is None
    settings.register_profile("pgmesh", derandomize=fixed, deadline=None, database=None, print_blob=True)
    settings.load_profile("pgmesh")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker is given the next file when it is done with one."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """What was imported is never garbage."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("hypothesis_seed")
    return "examples: " + (
        "the same on every run; --hypothesis-seed=N tries others" if seed is None else f"seed {seed}"
    )
