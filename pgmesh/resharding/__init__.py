"""Resharding: tensors from one mesh to another.

``sharding.py`` and ``plan.py`` are arithmetic, without torch. In ``connection.py`` the ranks meet, in ``link.py`` they
communicate, and ``transfer.py`` sends and receives. ``placed.py`` has parts of tensors, ``states.py`` finds the tensors
of both sides, ``descriptions.py`` compares them, and ``resharder.py`` is the whole. ``vllm.py`` gives the parameters of
vLLM the names of Hugging Face.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgmesh._util.lazy_names import lazy_names

_MODULE_OF = {
    **dict.fromkeys(["RankPlan", "ReshardPlan", "Transfer"], "plan"),
    "Placed": "placed",
    "vllm_parts": "vllm",
    **dict.fromkeys(["Moved", "Resharder", "reshard"], "resharder"),
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)


if TYPE_CHECKING:
    from pgmesh.resharding.placed import Placed as Placed
    from pgmesh.resharding.plan import RankPlan as RankPlan, ReshardPlan as ReshardPlan, Transfer as Transfer
    from pgmesh.resharding.resharder import Moved as Moved, Resharder as Resharder, reshard as reshard
    from pgmesh.resharding.vllm import vllm_parts as vllm_parts
