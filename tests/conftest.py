"""Settings of the test runs: Hypothesis tries the same examples each time, and the longest files start first."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Torch is imported in functions: pytest's own process, which only hands out the tests to the workers, does without.

TESTS = Path(__file__).parent

LONGEST = """
    connect/test_model elastic/test_model groups/test_first_use connect/test_faults faults/test_exits
    launch/test_launch preflight/test_check faults/test_torch_hazards resharding/test_resharder elastic/test_pauses
    interop/test_device_mesh elastic/test_shrink parallel/test_verify parallel/test_pipeline_shapes
    faults/test_faults recipes/test_recipes test_laws liveness/test_liveness report/test_eight_ranks
    groups/test_lifetime resharding/test_plan cli/test_command_line resharding/test_faults groups/test_groups
    resharding/test_reshard connect/test_connect parallel/test_base parallel/test_comparing docs/test_readme
"""
"""The slowest files. Files that wait alternate with files that compute; mypy runs next to the first two."""


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two hosts, on this machine; skips the test where that is not possible."""
    from tests.support.hosts import NoHostsError, two_hosts

    try:
        with two_hosts() as names:
            yield names
    except NoHostsError as error:
        pytest.skip(str(error))


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a rank that C++ aborts prints its stack
    fixed = config.getoption("hypothesis_seed") is None
    settings.register_profile("pgmesh", derandomize=fixed, deadline=None, database=None, print_blob=True)
    settings.load_profile("pgmesh")
    if "PGMESH_STARVED" in os.environ and not hasattr(config, "workerinput"):
        from tests.support.faults import busy_processes

        busy = contextlib.ExitStack()
        busy.enter_context(busy_processes(int(os.environ["PGMESH_STARVED"])))
        config.add_cleanup(busy.close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the slowest files to the front: each worker takes the next file when it has finished one."""
    places = {TESTS / f"{name}.py": place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude imported objects from garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("hypothesis_seed")
    return "examples: " + (
        "the same on every run; --hypothesis-seed=N tries others" if seed is None else f"seed {seed}"
    )
