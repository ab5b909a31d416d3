"""Several meshes in one program: an actor and a critic on different ranks, and a judge on all of them."""

import torch
import torch.distributed as dist

from pgmesh import ProcessGroupMesh, launch


def mean(mesh: ProcessGroupMesh, value: float) -> float:
    result = torch.tensor([value])
    dist.all_reduce(result, group=mesh.group())
    return float(result) / mesh.size()


def main() -> tuple[str, float]:
    actor = ProcessGroupMesh(dp=1, tp=2, ranks=range(2), name="actor")
    critic = ProcessGroupMesh(dp=2, ranks=[3, 2], name="critic")  # ranks in this order
    judge = ProcessGroupMesh(dp=4, name="judge")  # on all ranks, with separate communicators

    mine = actor if actor.rank in actor else critic
    other = critic if mine is actor else actor
    assert other.rank not in other
    assert critic.rank_of((0,)) == 3
    score = mean(mine, 1.0 if mine is actor else 3.0)
    return mine.name or "", mean(judge, score)


if __name__ == "__main__":
    results = launch.spawn(main, 4)
    print(f"ranks 0 to 3 worked as {', '.join(name for name, _ in results)}; all agree on {results[0][1]}")
    assert results == [("actor", 2.0), ("actor", 2.0), ("critic", 2.0), ("critic", 2.0)]
    print("PASS")
