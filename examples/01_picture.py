"""Print a mesh: the coords of all ranks, with this rank marked."""

from pgmesh import ProcessGroupMesh, launch


def main() -> str:
    mesh = ProcessGroupMesh(dp=-1, tp=2)  # -1: all remaining ranks
    if mesh.rank == 3:
        print(mesh)
        print(f"I am rank {mesh.rank} at {mesh.coord}, in files and logs {mesh.label()}.")
        print(f"My tensor-parallel ranks are {mesh.ranks('tp')}, and I am number {mesh.index('tp')} of them.")
        print(f"One replica back is rank {mesh.neighbor('dp', -1)}.")
        print(f"One on there is none, but round the ring it is rank {mesh.neighbor('dp', +1, wrap=True)}.")
    return mesh.label()


if __name__ == "__main__":
    assert launch.spawn(main, 4) == ["dp0-tp0", "dp0-tp1", "dp1-tp0", "dp1-tp1"]
    print("PASS")
