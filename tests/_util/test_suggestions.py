"""Calls that errors suggest: each runs as printed, and has the ranks and the name of the call that failed."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from math import prod
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from pgmesh import Layout, LifetimeError, PgmeshError, ProcessGroupMesh, ShapeError, plan
from pgmesh.planning.plan import Plan
from tests.support.fake_world import fake_rank

CALL = re.compile(r"^  (?!torchrun|launch\.)(\S.*?)(?:   +# (.*))?$|such as ([\w.]+\(.*\))\.$", re.MULTILINE)
"""A suggested call and its reason, on a line of its own or at the end of a sentence."""

Call = tuple[list[Any], dict[str, Any], int]


def suggested(error: PgmeshError) -> list[tuple[str, str]]:
    """The calls of an error, each with its reason."""
    return [(line or sentence, why) for line, why, sentence in CALL.findall(str(error))]


def caught(call: Callable[[], object]) -> PgmeshError | None:
    try:
        made = call()
    except PgmeshError as error:
        return error
    if isinstance(made, ProcessGroupMesh):
        made.close()
    return None


def close(opened: list[ProcessGroupMesh]) -> None:
    """Close these meshes; views are closed with the mesh that they are of."""
    while opened:
        with suppress(LifetimeError):
            opened.pop().close()


def check(error: PgmeshError, names: dict[str, Any], is_right: Callable[[Any, str], bool], mistakes: int) -> None:
    """Each suggested call makes the right thing; with several mistakes it may lead to an error whose calls do."""
    calls = suggested(error)
    assert calls or mistakes > 1 or "at most one size" in str(error), error
    here, opened = dict(names), []
    for call, why in calls:
        here["made"] = None
        word = re.match(r"(mesh|part) = ", call)
        acts = call.startswith(("for ", "mesh.configure", "mesh.group", "part.configure", "part.group"))
        if acts and ("part" if "part." in call else "mesh") not in here:
            continue  # an earlier line, which makes the mesh, led to the next error
        try:
            exec(call if word or acts else f"made = {call}", here)
        except ShapeError as wrong:
            if mistakes == 1:
                raise AssertionError(f"{error}\n\n{call}") from wrong
            check(wrong, names, is_right, mistakes - 1)
            continue
        made = here[word[1]] if word else here["made"]
        assert acts or is_right(made, why), f"{error}\n\n{call}"
        if isinstance(made, ProcessGroupMesh):
            opened.append(made)
        if not (word or acts):
            close(opened)
    close(opened)


def shuffled(n: int) -> list[int]:
    return Random(n).sample(range(8), n)


SIZES = st.lists(st.sampled_from([-1, 1, 2, 3, 4, 6]), max_size=3)
AXES = st.permutations(["dp", "tp", "cp"]) | st.permutations(["class", "timeout", "data-parallel"])
RANKS = st.integers(1, 8).flatmap(
    lambda n: st.sampled_from([range(n), range(8 - n, 8), [*range(n)], tuple(range(7, 7 - n, -1)), shuffled(n)])
)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Sizes by position and by keyword, and how many mistakes they may hold."""
    sizes, axes = draw(SIZES), draw(AXES)
    form = draw(st.sampled_from(["position", "keyword", "mapping", "numbers", "list"]))
    more = draw(st.just({}) | st.sampled_from([{"device": "cuda"}, {"timeout": 30}, {"tag": "own"}, {"rank": 2}]))
    named = dict(zip(axes, sizes))
    numbers = {i + 1: size for i, size in enumerate(sizes)}
    shape = {"position": sizes, "mapping": [named], "numbers": [numbers], "list": [sizes]}.get(form, [])
    keywords = named if form == "keyword" else {}
    plain = form != "list" and not more and not ("class" in axes and form == "keyword")
    return shape, {**keywords, **more}, 1 if plain else 4


@pytest.mark.parametrize("size", [1, 6, 8])
@settings(max_examples=40)
@given(call=calls(), ranks=st.none() | RANKS, name=st.sampled_from([None, "actor"]))
def test_suggested_meshes_keep_ranks_and_name(size, call, ranks, name):
    shape, sizes, mistakes = call

    def is_right(made: ProcessGroupMesh | Layout, why: str) -> bool:
        if isinstance(made, Layout):
            return why == "or plan it without processes"
        fewer = re.search(r"name the (\d+) rank", why)
        expected = range(int(fewer[1])) if fewer else range(size) if ranks is None else ranks
        return made.name == name and made.layout.ranks() == tuple(expected)

    with fake_rank(0 if ranks is None else min(ranks[0], size - 1), size):
        error = caught(lambda: ProcessGroupMesh(*shape, ranks=ranks, name=name, **sizes))
        if error is not None and "there is no rank" not in str(error):  # which the world is too small for
            names = {"ProcessGroupMesh": ProcessGroupMesh, "Layout": Layout, "timedelta": timedelta}
            check(error, names, is_right, mistakes)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    nodes=st.sampled_from(["2x4", "1x6", [4, 4], "3x4,2"]),
    form=st.sampled_from(["mapping", "free", "layout", "permuted"]),
    views=st.booleans(),
)
def test_suggested_plans_keep_ranks_and_views(sizes, nodes, form, views):
    box, count = dict(zip(["dp", "tp", "class"], sizes)), prod(sizes)
    order = [*range(1, count), 0] if form == "permuted" else range(count)
    layout = {**box, "cp": -1} if form == "free" else box if form == "mapping" else Layout(box, ranks=order)
    more = {"views": {"one": {"name": -1}}, "combinations": [("dp",)]} if views else {}
    error = caught(lambda: plan(layout, nodes=nodes, **more))
    if error is not None:

        def is_right(made: Plan, _: str) -> bool:
            kept = count == 1 or form != "permuted" or made.layout.ranks() == tuple(order)
            return kept and [name for name, _ in made.views] == ["one"] * views

        check(error, {"Layout": Layout, "plan": plan}, is_right, 1)


def test_ranks_too_long_to_print_are_named():
    ranks = Random(0).sample(range(999), 999)
    with pytest.raises(ShapeError) as info:
        Layout(dp=2, ranks=ranks)
    ((call, _),) = suggested(info.value)
    assert call == "Layout(dp=-1, ranks=ranks)"
    assert eval(call).ranks() == tuple(ranks)
    with pytest.raises(ShapeError) as info:
        Layout(dp=2, ranks=[*range(300), *range(400, 700)])
    ((call, _),) = suggested(info.value)
    assert call == "Layout(dp=-1, ranks=(*range(300), *range(400, 700)))"
