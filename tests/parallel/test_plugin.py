"""The method of ``examples/plugin``, DiLoCo, installed by pip and composed with the methods of pgmesh.

The reference is a plain loop in one process, over replicas that read different rows.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pgmesh import ProcessGroupMesh
from pgmesh.parallel import compose, find
from tests.support.parallel_models import full_tensor, named_weights, optimizer_of
from tests.support.small_model import FIRST_STAGE, SmallModel, batch, loss_of, partner
from tests.support.worlds import check_sums, groups_of, world

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
STEPS, EVERY, REPLICAS = 7, 2, 2
TOLERANCE = 1e-12  # 64-bit floats: only the order of sums differs


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the package."""
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(ROOT / "examples" / "plugin", folder / "source")  # where a build may leave what it likes
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    command = [*pip, "--no-build-isolation", "--target", str(folder / "site"), str(source)]
    subprocess.run(command, timeout=120, check=True)
    return folder / "site"


def model_of(replica: int, frozen: tuple[str, ...]) -> SmallModel:
    """The model, with other weights on each replica until they are broadcast."""
    model = SmallModel(frozen)
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.requires_grad):
            weight += 0.25 * replica
    return model


def plain_loop(frozen: tuple[str, ...]) -> list[SmallModel]:
    """The replicas after training in one process."""
    replicas = [model_of(i, frozen) for i in range(REPLICAS)]
    optimizers = [optimizer_of(replica.parameters()) for replica in replicas]
    trainable = [[weight for weight in each.parameters() if weight.requires_grad] for each in replicas]
    with torch.no_grad():
        theta = [weight.detach().clone() for weight in trainable[0]]
        velocity = [torch.zeros_like(each) for each in theta]
        for weights in trainable:
            torch._foreach_copy_(weights, theta)
    for step in range(STEPS):
        for i, replica in enumerate(replicas):
            rows, target = (each.chunk(REPLICAS)[i] for each in batch(step))
            optimizers[i].zero_grad()
            loss_of(replica(rows), target).backward()
            optimizers[i].step()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                for n, weights in enumerate(zip(*trainable)):
                    delta = theta[n] - torch.stack([*weights]).mean(0)  # SGD with Nesterov momentum, by torch's page
                    velocity[n] = 0.9 * velocity[n] + delta
                    theta[n] = theta[n] - 0.7 * (delta + 0.9 * velocity[n])
                    for weight in weights:
                        weight.copy_(theta[n])
    return replicas


def trained(site: Path, kind: str, frozen: tuple[str, ...]) -> float:
    """Train on the mesh, and return the greatest difference from the plain loop."""
    with (
        pytest.MonkeyPatch.context() as patch,
        ProcessGroupMesh(dp=2, x=2 if kind else 1, name=kind or "alone") as mesh,
    ):
        patch.syspath_prepend(str(site))
        diloco = find("diloco")(mesh, "dp", every=EVERY)
        assert Path(sys.modules["pgmesh_diloco"].__file__).parent == site
        others, mine = [partner(mesh, kind, "x")] if kind else [], mesh.index("dp")
        together, model = compose(mesh, diloco, *others), model_of(mine, frozen)
        together.broadcast(model)
        model = together.apply(model)
        optimizer = together.attach(optimizer_of(model.parameters()))
        for step in range(STEPS):
            rows, target = map(together.share, batch(step))
            optimizer.zero_grad()
            if hasattr(model, "step"):
                model.step(rows, target=target)
            else:
                loss_of(model(rows), target).backward()
            optimizer.step()
        right = dict(plain_loop(frozen)[mine].named_parameters())
        check_sums(groups_of(mesh))
        return max((full_tensor(each) - right[name]).abs().max().item() for name, each in named_weights(model))


@pytest.mark.parametrize(
    ("kind", "frozen"), [("", ()), ("sharding", ()), ("tensor", ()), ("two stages", ()), ("pipeline", FIRST_STAGE)]
)
def test_composed_diloco_equals_a_plain_loop(site: Path, kind: str, frozen: tuple[str, ...]):
    assert max(world(4 if kind else 2).run(trained, site, kind, frozen)) < TOLERANCE
