"""Plans: their numbers, their findings, their text and their JSON."""

from __future__ import annotations

import json
import re

import pytest

from pgmesh import Layout, RankError, ShapeError, plan
from pgmesh.planning import axis_heuristics
from tests.support import golden_files as golden

BASE = Layout(pp=2, dp=4, cp=2, tp=4)
TURNED = Layout(tp=4, cp=2, dp=4, pp=2)
MOE = {"moe": {"pp": 2, "edp": -1, "ep": 8}}

PLANS = {
    "64-ranks": lambda: plan(BASE, nodes="8x8", views=MOE, combinations=[("dp", "cp")]),
    "uneven-hosts": lambda: plan(Layout(dp=5, tp=4), nodes="8,6,6"),
    "nvlink-domains": lambda: plan(Layout(pp=4, dp=9, tp=8), domains="4x18x4"),
    "a-million-ranks": lambda: plan(Layout(pp=16, dp=512, cp=8, tp=16), nodes="131072x8"),
    "no-hosts": lambda: plan(Layout(pp=2, dp=2, tp=2)),
    "one-rank": lambda: plan(Layout(dp=1), nodes="1x1"),
    "hosts-of-all-kinds": lambda: plan(Layout(dp=10, tp=8), nodes=[8, 4, 16, 6, 7, 8, 4, 16, 6, 5]),
    "many-uneven": lambda: plan(
        Layout(pp=8, dp=1 << 11, tp=8), nodes="12500x8,7768x4", views={"experts by": {"edp": -1, "ep": 24 // 3 * 4}}
    ),
    "no-axis": lambda: plan(Layout(dp=2, tp=2).at(dp=1, tp=0), nodes="1x4"),
}


@pytest.mark.parametrize("name", PLANS)
def test_plan_text_equals_golden_file(name):
    text = str(PLANS[name]())
    assert max(map(len, text.splitlines())) <= 80
    golden.check(f"plan-{name}.txt", text + "\n")


@pytest.mark.parametrize("name", ["64-ranks", "uneven-hosts", "nvlink-domains"])
def test_plan_json_equals_golden_file(name):
    planned = PLANS[name]()
    assert json.loads(planned.json()) == json.loads(json.dumps(planned.data()))
    golden.check(f"plan-{name}.json", planned.json() + "\n")


def test_plans_of_equal_content_are_equal():
    assert plan(BASE, nodes="8x8") == plan(BASE, nodes=[8] * 8)
    assert plan(BASE, nodes="8x8") != plan(BASE, nodes="16x4")
    assert plan(BASE, nodes="8x8") != plan(TURNED, nodes="8x8")
    assert len({plan(BASE, nodes="8x8"), plan(BASE, nodes="8x8")}) == 1
    assert repr(plan(BASE, nodes="8x8")) == "<Plan of 64 ranks: pp=2 dp=4 cp=2 tp=4 on 8 hosts of 8>"


def test_plan_finds_groups_by_their_axes():
    numbered = plan(2, 4)
    assert numbered[0] == numbered["0"]
    planned = plan(BASE, nodes="8x8", views=MOE, combinations=[("cp", "dp")])
    assert planned["dp x cp"].strides == (4,)
    assert planned["moe: ep"].size == 8
    with pytest.raises(
        RankError, match="no groups along 'ep'; there are pp, dp, cp, tp, dp x cp, moe: pp, moe: edp, moe: ep"
    ):
        planned["ep"]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, dp=4, cp=2, tp=4),
        Layout(a=2, b=1, c=6, ranks=[*range(11, -1, -1)]),
        Layout(a=4, b=2, c=2).at(a=[0, 2]),  # in the view w, one axis has no stride
    ],
)
def test_communicators_with_several_names_are_counted_once(layout):
    views = {"v": {"x": 2, "y": len(layout) // 2}, "w": {"z": len(layout)}}
    combinations = [layout.axes[:2], layout.axes[1:], layout.axes]
    planned = plan(layout, views=views, combinations=combinations)
    read = [(layout, axes) for axes in [*((axis,) for axis in layout.axes), *combinations]]
    read += [(layout.view(**box), (axis,)) for box in views.values() for axis in box]
    kinds = {frozenset(map(frozenset, whole.partition(*axes))) for whole, axes in read if whole.size(*axes) > 1}
    assert planned.communicators == len(kinds)


FINDINGS = re.findall(r"^== (.*)$", golden.read("plan-findings.txt"), re.MULTILINE)
"""To add a plan, add a line to the file and run this with ``GOLDEN=write``."""


def test_findings_and_fixes_equal_golden_file():
    said = {call: [str(finding) for finding in eval(call).findings] for call in FINDINGS}
    golden.check(
        "plan-findings.txt", "\n".join("\n".join([f"== {call}", *found]) + "\n" for call, found in said.items())
    )


def test_fixes_reduce_the_hops():
    for layout in (TURNED, Layout(tp=8, dp=8), Layout(cp=2, tp=4, dp=8), Layout(ep=8, pp=4, tp=2)):
        worse = plan(layout, nodes="8x8")
        for finding in worse.findings:
            if finding.fix:
                order = finding.fix.removeprefix("--order ").split(",")
                better = plan(Layout(**{axis: layout.size(axis) for axis in order}), nodes="8x8")
                name = finding.text.split()[0]
                assert better[name].localities[0].hops_high < worse[name].localities[0].hops_high


def test_axes_are_ordered_by_traffic():
    assert axis_heuristics.order_by_traffic(["tp", "ep", "pp", "dp"]) == ("pp", "dp", "ep", "tp")
    assert axis_heuristics.order_by_traffic(["tp", "x"]) == ("x", "tp")


@pytest.mark.parametrize(
    ("axis", "method"),
    [("tp", "tensor"), ("TP", "tensor"), ("tp0", "tensor"), ("dp_shard", "data"), ("dp_replicate", "data"),
     ("expert-data", "data"), ("seq", "context"), ("stage", "pipeline"), ("moe", "expert"), ("x", None), (0, None)],
)  # fmt: skip
def test_method_of_axis_is_known_by_its_name(axis, method):
    found = axis_heuristics.method_of(axis)
    assert (found and found.name) == method


def test_plan_suggested_for_a_view_keeps_the_others():
    with pytest.raises(ShapeError, match="holds 3 ranks, but the mesh has 8") as caught:
        plan(dp=8, views={"moe": {"ep": 3}, "x": {"a": 8}})
    better = eval(str(caught.value).splitlines()[-1].partition("   # ")[0].strip())
    assert better["moe: ep"].size == 8
    assert [name for name, _ in better.views] == ["moe", "x"]


def test_slices_and_meshes_may_leave_hosts_empty():
    for pp in (0, 1, [0], slice(1)):
        assert len(plan(BASE.at(pp=pp), nodes="8x8").layout) == 32
    assert len(plan(BASE.at(pp=0).view(ep=8, edp=4), nodes="8x8").layout) == 32
    assert len(plan(Layout(dp=4, ranks=range(4, 8)), nodes="2x4").layout) == 4
    with pytest.raises(ShapeError, match="holds 64 ranks, but 16 hosts of 8 hold 128"):
        plan(BASE.at(pp=[0, 1]), nodes="16x8")  # all of it

    class Mesh:
        layout = Layout(dp=6)

    assert len(plan(Mesh(), nodes="2x4").layout) == 6
