"""The pages for those who come from another system: complete, and each line runs and gives what it says."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from pgmesh import Layout, PgmeshError, ProcessGroupMesh, launch, recipes
from pgmesh.parallel import PipelineParallel
from tests.support import golden_files
from tests.support.fake_world import fake_rank
from tests.support.programs import run_ranks, said_by, script_of
from tests.support.worlds import fresh_world, world

DOCS = Path(__file__).parents[2] / "docs" / "coming_from"
FUNCTIONS = json.loads(golden_files.read("functions-of-pages.json"))

NEWER = {
    *("create_hybrid_dp_cp_groups", "get_hybrid_data_context_parallel_groups", "has_separate_all_gather_group"),
    *("hybrid_context_parallel", "create_all_gather_group", "independent_all_gather"),
}
"""Functions and parameters of Megatron-Core that its documentation does not have yet."""


def functions_of_megatron() -> dict[str, str]:
    """Every function, and the parameters of a class, of the installed Megatron-Core's ``parallel_state``."""
    spec = importlib.util.find_spec("megatron")
    if spec is None:
        pytest.skip("Megatron-Core is not installed")
    source = Path(next(iter(spec.submodule_search_locations or ())), "core", "parallel_state.py")
    found = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _parameters(node)
        elif isinstance(node, ast.ClassDef):
            methods = {each.name: _parameters(each) for each in node.body if isinstance(each, ast.FunctionDef)}
            found |= {node.name: methods.pop("__init__"), **methods}
    return {name: parameters for name, parameters in found.items() if name not in NEWER}


def _parameters(function: ast.FunctionDef) -> str:
    names = [each.arg for each in function.args.args]
    return " ".join(name for name in names if name not in ("self", *NEWER))


PAGES: dict[str, Callable[[], Mapping[str, str]]] = {
    "megatron": functions_of_megatron,
    "olmo_core": lambda: FUNCTIONS["olmo_core"],
    "fairscale": lambda: FUNCTIONS["fairscale"],
    "oslo": lambda: FUNCTIONS["oslo"],
}
"""The functions of each system, with their parameters. Those of ``from_slurm`` of OSLO do not repeat the five sizes."""

EXPECTED = json.loads(golden_files.read("values-of-pages.json"))
VALUES: dict[str, dict[str, str]] = EXPECTED["lines"]
"""By page and line, what the line gives on rank 5 of 8: the repr, or the name of the exception."""

ENDINGS: dict[str, dict[str, str]] = EXPECTED["endings"]
"""By page and line, what has to follow the line for a value that can be compared, such as ``.size()`` of a group."""

GETTERS = {
    "group": ".group().size()",
    "group_gloo": '.group(backend="gloo").size()',
    "world_size": ".size()",
    "rank": ".index()",
    "src_rank": ".ranks()[0]",
    "ranks": ".ranks()",
    "global_ranks": ".ranks()",
}
"""What the getters of Megatron and fairscale are here, by the end of their names."""

OSLO_GETTERS = {"get_local_rank": ".index()", "get_world_size": ".size()"}


class Row(NamedTuple):
    page: str
    before: list[str]  # what one used to write
    now: str

    def __str__(self) -> str:
        return f"{self.page}-{self.before[0].removesuffix(')').replace('(', '-')}"


def rows(page: str, functions: Mapping[str, str] | None = None) -> Iterator[Row]:
    """The lines of each table "you used to write / now" on a page, and a line for each getter among these functions."""
    read = None
    for line in (DOCS / f"{page}.md").read_text().splitlines():
        if not line.startswith("|"):
            read = None
        elif line == "| you used to write | now |":
            read = lambda cells: [Row(page, cells[0], cells[1][0])]  # noqa: E731
        elif line.startswith("| `get_..._group()` and so on |"):
            read = lambda cells: kinds_of_getters(page, functions or {}, cells[0], cells[-1])  # noqa: E731
        elif line == "| `ParallelMode` | here |":
            read = lambda cells: oslo_getters(*cells)  # noqa: E731
        elif read is not None and not line.startswith("|---"):
            yield from read([re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split(" | ")])


def kinds_of_getters(page: str, functions: Mapping[str, str], kinds: list[str], names: list[str]) -> Iterator[Row]:
    """The getters of a row: of several kinds of groups with their names, or of one kind with its options."""
    if len(kinds) == len(names):
        for kind, name in zip(kinds, names):
            yield from getters(page, functions, kind, name=name)
    else:
        yield from getters(page, functions, *kinds, name=names[0])


def getters(page: str, functions: Mapping[str, str], kind: str, *options: str, name: str) -> Iterator[Row]:
    """The getters of one kind of group, of which each has all of these options."""
    for function, given in functions.items():
        end = function.removeprefix(f"get_{kind}_")
        if function.startswith(f"get_{kind}_") and end in GETTERS and {*options} <= {*given.split()}:
            yield Row(page, [f"{function}({', '.join(options)})"], f'arrangement["{name}"]{GETTERS[end]}')


def oslo_getters(modes: list[str], names: list[str]) -> Iterator[Row]:
    for mode, name in zip(modes, names, strict=True):
        for function, end in OSLO_GETTERS.items():
            yield Row("oslo", [f"{function}({mode})"], f'context["{name}"]{end}')


JOBS = [row for page in PAGES for row in rows(page) if row.now.startswith("launch.")]


def namespace(page: str) -> dict[str, Any]:
    """What a line on a page may use: the examples at the top of it, and whatever its lines give a name."""
    names: dict[str, Any] = {"torch": torch, "dist": dist, "timedelta": timedelta, "Layout": Layout, "recipes": recipes}
    names |= {"PipelineParallel": PipelineParallel, "ProcessGroupMesh": ProcessGroupMesh}
    text = (DOCS / f"{page}.md").read_text()
    for example in doctest.DocTestParser().get_examples(text):
        if re.match(r"\w+ = ", example.source):
            exec(example.source, names)
    for row in rows(page):
        if re.match(r"\w+ = ", row.now):
            exec(row.now, names)
    return names


def value_of(line: str, names: dict[str, Any]) -> str:
    """The repr of an expression, or the name of the exception that it raises."""
    try:
        return repr(eval(line, names))
    except PgmeshError as error:
        return type(error).__name__


@pytest.mark.parametrize(
    ("page", "line"), [(page, line) for page, values in VALUES.items() for line in values], ids=str
)
def test_each_line_gives_its_value(page: str, line: str):
    with fake_rank(5, 8, dist.HashStore()):
        assert value_of(line, namespace(page)) == VALUES[page][line]


@pytest.mark.parametrize("page", PAGES)
def test_each_line_has_a_value_or_name(page: str):
    endings = ENDINGS[page]
    lines = [row.now for row in rows(page, PAGES[page]()) if row not in JOBS]
    assert endings.keys() <= {*lines}
    expressions = {line + endings.get(line, "") for line in lines if not re.match(r"\w+ = ", line)}
    assert expressions <= VALUES[page].keys()


@pytest.mark.parametrize("row", JOBS, ids=str)
def test_each_line_for_jobs_names_a_function(row: Row):
    call = ast.parse(row.now, mode="eval").body
    assert isinstance(call, ast.Call)
    assert callable(eval(ast.unparse(call.func), {"launch": launch}))


def powers(*ranks: int) -> float:
    return float(sum(2**rank for rank in ranks))


SAYS: dict[str, Callable[[int], str]] = {
    "megatron": lambda r: f"{r ^ 4} {powers(r, r ^ 2, r ^ 4, r ^ 6)}",
    "colossalai": lambda r: f"{(r >> 2, r >> 1 & 1, r & 1)} {powers(*range(8))}",
}


@pytest.mark.long
@pytest.mark.parametrize("page", SAYS)
def test_the_script_of_a_page_runs(page: str):
    assert world(8).run(said_by, script_of(page)) == [f"{SAYS[page](rank)}\n" for rank in range(8)]


def test_script_of_frameworks_prints_what_is_shown():
    page = (DOCS.parent / "frameworks.md").read_text(encoding="utf-8")
    ((program, shown),) = re.findall(r"^```python\n(.*?)^```\n\n```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert page.count("```python") == 1
    with fresh_world(4) as own:
        assert own.run(said_by, program)[0] == shown


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_complete(page: str):
    functions = PAGES[page]()
    named: dict[str, set[str]] = {}
    without = (
        {"check_initialized"}
        if "`check_initialized` has no counterpart" in (DOCS / f"{page}.md").read_text()
        else set()
    )
    for row in rows(page, functions):
        for call in row.before:
            function, _, given = call.removesuffix(")").partition("(")
            named.setdefault(function, set()).update(filter(None, given.split(", ")))
    assert {function: given - without for function, given in named.items()} == {
        function: {*given.split()} - without for function, given in functions.items()
    }


def test_olmo_page_has_all_exported_names():
    table = (DOCS / "olmo_core.md").read_text().partition("## Names")[2]
    assert set(re.findall(r"`([^`]+)`", "".join(line.split(" | ")[0] for line in table.splitlines()))) == set(
        FUNCTIONS["olmo_core names"]
    )


def test_megatron_page_has_all_short_names():
    found: dict[str, str] = {}
    page = (DOCS / "megatron.md").read_text()
    for shorts, names in re.findall(r"^\| .* \| (`\w+`.*) \| (`.+) \|$", page, re.MULTILINE):
        found.update(zip(re.findall(r"`(\w+)`", shorts), re.findall(r"`([^`]+)`", names)))
    arrangement = recipes.megatron(4, cp=4, hierarchical_cp=[2, 2], of=Layout)
    assert found == {short: names[0] for short, names in arrangement.short.items()}
    assert all(name in arrangement.names for names in arrangement.short.values() for name in names)


# ---- torchtitan: a script, with its class and with that of the page ----

TORCHTITAN = (DOCS / "torchtitan.md").read_text(encoding="utf-8")
BEFORE, CLASS = re.findall(r"^```python\n(.*?)^```", TORCHTITAN, re.MULTILINE | re.DOTALL)
(PRINTED,) = re.findall(r"^```console\n(.*?)^```", TORCHTITAN, re.MULTILINE | re.DOTALL)
IMPORTS, _, REST = BEFORE.partition("\n\n")
AFTER = f"{IMPORTS}\n\n{CLASS}\n\n{REST.replace('= ParallelDims(', '= Dims(')}"

needs_torchtitan = pytest.mark.skipif(not importlib.util.find_spec("torchtitan"), reason="torchtitan is not installed")


def test_torchtitan_page_shows_class_of_the_example():
    program = (DOCS.parents[1] / "examples" / "torchtitan_meshes.py").read_text(encoding="utf-8")
    assert CLASS[CLASS.index("class Dims") :] in program
    assert AFTER.count("= Dims(") == 1


@needs_torchtitan
@pytest.mark.long
@pytest.mark.parametrize("program", [BEFORE, AFTER], ids=["before", "after"])
def test_script_prints_what_the_torchtitan_page_shows(tmp_path: Path, program: str):
    assert run_ranks(tmp_path, program, 4) == PRINTED


@needs_torchtitan
@pytest.mark.long
def test_torchtitan_table_has_each_degree_and_mesh():
    from torchtitan.config.configs import ParallelismConfig
    from torchtitan.distributed import ParallelDims

    table = TORCHTITAN.partition("## Degrees and axes")[2]
    degrees = {field.name for field in dataclasses.fields(ParallelismConfig) if field.name.endswith("_degree")}
    assert set(re.findall(r"\w+_degree", table)) == degrees
    documented = set(re.findall(r"^ +(\w+):  ", str(ParallelDims.build_mesh.__doc__), re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", table)) >= documented
