"""Resharding: tensors from one mesh to another. ``sharding.py`` and ``plan.py`` are arithmetic, without torch."""

from pgmesh.resharding.plan import RankPlan as RankPlan, ReshardPlan as ReshardPlan, Transfer as Transfer

__all__ = ["RankPlan", "ReshardPlan", "Transfer"]
