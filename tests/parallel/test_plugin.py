"""The method of ``examples/plugin``, DiLoCo, installed by pip and composed with the methods of pgmesh.

The reference is a plain loop in one process, over replicas that read different rows.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

from pgmesh import ProcessGroupMesh
from pgmesh.parallel import Method, compose, find
from tests.support.parallel_models import full_tensor, named_weights, optimizer_of
from tests.support.small_model import FIRST_STAGE, SmallModel, batch, loss_of, partner
from tests.support.worlds import check_sums, groups_of, world

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
STEPS, EVERY, REPLICAS = 7, 2, 2
TOLERANCE = 1e-12  # 64-bit floats: only the order of sums differs
OUTER = {"the paper's": {}, "local SGD": {"outer": partial(SGD, lr=1.0)}}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the package."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(ROOT / "examples" / "plugin", folder / "source")  # where a build may leave what it likes
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    command = [*pip, "--no-build-isolation", "--target", str(folder / "site"), str(source)]
    subprocess.run(command, timeout=120, check=True)
    return folder / "site"


@contextmanager
def on_the_path(site: Path) -> Iterator[None]:
    """Let this process import from a folder."""
    sys.path.insert(0, str(site))
    try:
        yield
    finally:
        sys.path.remove(str(site))
        sys.modules.pop("pgmesh_diloco", None)


def model_of(replica: int, frozen: tuple[str, ...]) -> SmallModel:
    """The model, with other weights on each replica until they are broadcast."""
    model = SmallModel(frozen)
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.requires_grad):
            weight += 0.25 * replica
    return model


def plain_loop(outer: str, frozen: tuple[str, ...] = ()) -> tuple[list[list[float]], list[SmallModel]]:
    """Losses of each replica's steps, and the replicas, after training in one process."""
    replicas = [model_of(i, frozen) for i in range(REPLICAS)]
    optimizers = [optimizer_of(replica.parameters()) for replica in replicas]
    trainable = [[weight for weight in each.parameters() if weight.requires_grad] for each in replicas]
    losses: list[list[float]] = [[] for _ in replicas]
    with torch.no_grad():
        theta = [weight.detach().clone() for weight in trainable[0]]
        velocity = [torch.zeros_like(each) for each in theta]
        for weights in trainable:
            torch._foreach_copy_(weights, theta)
    for step in range(STEPS):
        for i, replica in enumerate(replicas):
            rows, target = (each.chunk(REPLICAS)[i] for each in batch(step))
            optimizers[i].zero_grad()
            loss = loss_of(replica(rows), target)
            loss.backward()
            optimizers[i].step()
            losses[i].append(loss.item())
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for n, weights in enumerate(zip(*trainable)):
                    delta = theta[n] - torch.stack([*weights]).mean(0)
                    if outer == "local SGD":
                        theta[n] = theta[n] - delta
                    else:  # SGD with Nesterov momentum, of torch's documentation
                        velocity[n] = 0.9 * velocity[n] + delta
                        theta[n] = theta[n] - 0.7 * (delta + 0.9 * velocity[n])
                    for weight in weights:
                        weight.copy_(theta[n])
    return losses, replicas


def partners(mesh: ProcessGroupMesh, kind: str) -> list[Method]:
    """The other methods, by the axes of the mesh."""
    kinds = {"pp": "two stages" if "two stages" in kind else "pipeline", "tp": "tensor", "fsdp": "sharding"}
    return [partner(mesh, kinds[axis], axis) for axis in mesh.axes if axis != "dp"]


def trained(site: Path, sizes: dict[str, int], kind: str, outer: str, frozen: tuple[str, ...]) -> float:
    """Train on the mesh, and return the greatest difference from the plain loop."""
    expected_losses, replicas = plain_loop(outer, frozen)
    with on_the_path(site), ProcessGroupMesh(**sizes, name=f"{kind}, {outer}") as mesh:
        diloco = find("diloco")(mesh, "dp", every=EVERY, **OUTER[outer])
        assert Path(sys.modules["pgmesh_diloco"].__file__).parent == site
        together, mine = compose(mesh, diloco, *partners(mesh, kind)), mesh.index("dp")
        model = model_of(mine, frozen)
        together.broadcast(model)
        model = together.apply(model)
        optimizer = together.attach(optimizer_of(model.parameters()))
        furthest = 0.0
        for step in range(STEPS):
            rows, target = map(together.share, batch(step))
            optimizer.zero_grad()
            if hasattr(model, "step"):
                losses = model.step(rows, target=target)
                loss = torch.stack(losses).mean() if losses else None
            else:
                loss = loss_of(model(rows), target)
                loss.backward()
            optimizer.step()
            if loss is not None and "fsdp" not in sizes:  # otherwise it is the loss of a part of the replica's rows
                furthest = max(furthest, abs(loss.item() - expected_losses[mine][step]))
        right = dict(replicas[mine].named_parameters())
        for name, weight in named_weights(model):
            furthest = max(furthest, (full_tensor(weight) - right[name]).abs().max().item())
        check_sums(groups_of(mesh))
    return furthest


@pytest.mark.parametrize(
    ("sizes", "kind", "frozen"),
    [
        ({"dp": 2}, "alone", ()),
        ({"dp": 2, "fsdp": 2}, "sharded", ()),
        ({"dp": 2, "tp": 2}, "tensor", ()),
        ({"dp": 2, "pp": 2}, "pipeline", ()),
        ({"dp": 2, "pp": 2}, "pipeline of two stages on each rank", ()),
        ({"dp": 2, "pp": 2}, "pipeline with a frozen stage", FIRST_STAGE),
        ({"dp": 2, "pp": 2, "fsdp": 2}, "pipeline of sharded stages", ()),
        ({"pp": 2, "dp": 2, "tp": 2}, "pipeline of tensor parallel stages", ()),
        ({"dp": 2, "fsdp": 2, "tp": 2}, "sharded and tensor", ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_composed_diloco_equals_a_plain_loop(site, sizes, kind, frozen):
    ranks = 1
    for size in sizes.values():
        ranks *= size
    for outer in OUTER if kind == "alone" else ["the paper's"]:
        assert max(world(ranks).run(trained, site, sizes, kind, outer, frozen)) < TOLERANCE
