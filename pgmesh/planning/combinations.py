"""The plan of one combination of axes, from the strides of the layout and not from a list of its groups.

Irregular layouts are counted rank by rank; see ``topology.locality``.
"""

from __future__ import annotations

from dataclasses import replace

from pgmesh.layout import Axis, Layout, Partition
from pgmesh.planning.data import CombinationPlan
from pgmesh.planning.text_report import sample_of
from pgmesh.topology.hosts import Topology
from pgmesh.topology.locality import locality_of, strided_runs

Known = dict[str, tuple[Partition, object]]
"""The groups of each combination by its name, and their identity if the layout is regular, else None."""


def combination_plan(
    view: str, layout: Layout, axes: tuple[Axis, ...], topology: Topology, known: Known
) -> CombinationPlan:
    """The plan of all groups along some axes.

    Args:
        view: the name of the view that ``layout`` is; "" for the mesh itself.
        known: the combinations of the mesh and its views with different groups. New ones are added.
    """
    group = layout.along(layout.rank_of([0] * len(layout.axes)), *axes)  # its axes are in the order of the mesh
    plan = CombinationPlan(
        view=view,
        axes=group.axes,
        size=len(group),
        groups=len(layout) // len(group),
        strides=tuple(stride for _, stride in runs_of(group)),
        sample=sample_of(group.ranks_in_order()),
        localities=tuple(locality_of(layout, group.axes, level) for level in topology),
    )
    if plan.size == 1:
        return plan
    groups, identity = layout.partition(*group.axes), _identity_of_groups(layout, group)
    for name, (others, their_identity) in known.items():
        # All views list their groups in the order of the mesh.
        if identity == their_identity if identity and their_identity else groups == others:
            return replace(plan, same_as=name)
    known[plan.name] = groups, identity
    return plan


def runs_of(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Size and stride of each axis, with contiguous axes merged into one; empty if a stride is not constant."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(layout.shape, layout.strides):
        if stride is None:
            return ()
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            size *= merged.pop()[0]
        merged.append((size, stride))
    return tuple(merged)


def _identity_of_groups(layout: Layout, group: Layout) -> object:
    """A value that is equal for the same groups of the mesh and its views; None for an irregular layout."""
    return None if strided_runs(layout, group.axes) is None else (runs_of(group), runs_of(layout))
