"""Options of a group, a second communicator on the same ranks, and release."""

from datetime import timedelta

import torch
import torch.distributed as dist

from pgmesh import OptionsError, ProcessGroupMesh, launch


def main() -> bool:
    with ProcessGroupMesh(dp=2, tp=2, name="actor") as mesh:
        # The owner of an axis sets the options of its group, before the first use.
        mesh.configure("dp", timeout=timedelta(minutes=2))
        gradients = mesh.group("dp")
        try:
            mesh.configure("dp", timeout=timedelta(minutes=9))
        except OptionsError as error:
            if mesh.rank == 0:
                print(f"OptionsError: {error}")

        # Parameters are gathered while gradients are reduced: two communicators on the same ranks.
        gather = mesh.group("dp", tag="all-gather")
        assert gather is not gradients
        works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in (gather, gradients)]
        for work in works:
            assert work is not None
            work.wait()

        mesh.release("dp")  # destroys both, with their threads and sockets
        assert mesh.group("dp") is not gradients  # a new group with a new name
    return True


if __name__ == "__main__":
    assert all(launch.spawn(main, 4))
    print("PASS")
