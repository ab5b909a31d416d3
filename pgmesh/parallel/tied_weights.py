"""Weights that the first and the last stage of a pipeline share, such as an embedding and the head of the model.

Each of the two stages has a copy, and its backward pass computes a part of the gradient. After each step the parts are
summed. The copies start equal and get equal gradients, so an optimizer keeps them equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pgmesh.errors import MethodError
from pgmesh.parallel.exchange import broadcast_all, on_served_device
from pgmesh.parallel.gradients import local
from pgmesh.parallel.names import plain_name
from pgmesh.parallel.stages import Stages


class TiedWeights:
    """The tied weights on this rank, which has the first stage, the last, both or neither of them.

    Args:
        stages: the stages of the pipeline.
        parts: this rank's stages, after other methods were applied to them.
        names: names of each tied parameter: in the first stage, and in the last.

    Raises:
        MethodError: other methods gave a parameter another name.
    """

    def __init__(self, stages: Stages, parts: nn.ModuleList, names: Sequence[tuple[str, str]]) -> None:
        self.stages, self.parts, self.names = stages, parts, names
        for first, last in names:
            self._copies(first, last)  # raises if one is not found

    def last_copies(self) -> list[nn.Parameter]:
        """The copies in the last stage, if this rank has it."""
        return [weight for _, last in self.names for weight in self._find(self.stages.last, last)]

    def sum_gradients(self) -> None:
        """Replace the gradients of both copies of each weight by their sum."""
        for first, last in self.names:
            gradients = [*map(local, self._gradients(first, last))]
            if gradients:
                total = sum(gradients[1:], gradients[0])
                if group := self.stages.end_group:
                    with on_served_device(total, group) as summed:
                        dist.all_reduce(summed, group=group)
                for gradient in gradients:
                    gradient.copy_(total)

    def copy_first(self, canonical_names: Mapping[str, str]) -> None:
        """Give both copies of each weight the values of that whose name is first in the model. Ranks of both call it.

        Args:
            canonical_names: the first name of each other name of a tied parameter.
        """
        for first, last in self.names:
            source = int(canonical_names.get(first) == last)  # 1 for the copy in the last stage
            copies = [local(weight).detach() for weight in self._copies(first, last).values()]
            if group := self.stages.end_group:
                broadcast_all(copies, group, source)
            elif copies:
                copies[1 - source].copy_(copies[source])

    def _gradients(self, first: str, last: str) -> Iterator[torch.Tensor]:
        """The gradients of this rank's copies of a weight, unless it is frozen."""
        for weight in self._copies(first, last).values():
            if weight.requires_grad:
                if weight.grad is None:  # the other copy may have a gradient
                    weight.grad = torch.zeros_like(weight)
                yield weight.grad

    def _copies(self, first: str, last: str) -> dict[str, nn.Parameter]:
        """This rank's copies of a weight, by name: none to two."""
        ends = (0, first), (self.stages.last, last)
        return {name: weight for stage, name in ends for weight in self._find(stage, name)}

    def _find(self, stage: int, name: str) -> list[nn.Parameter]:
        """The parameter of this name in a stage; an empty list if this rank does not have the stage.

        Raises:
            MethodError: the stage has no such parameter.
        """
        if stage not in self.stages.own:
            return []
        part = self.parts[self.stages.own.index(stage)]
        for full_name, weight in part.named_parameters(remove_duplicate=False):
            if plain_name(part, full_name) == name:
                return [weight]
        raise MethodError(
            f"{name}, which is tied to a parameter of another stage, is not found in stage {stage} after other "
            "methods. A method has to keep the names of parameters, but for a wrapper that its apply returns."
        )
