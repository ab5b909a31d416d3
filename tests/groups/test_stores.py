"""Worlds over stores that are no TCPStore: a FileStore, and stores that are written in Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import clean_env, run_programs

PYTHON_STORE = """
import sys
from datetime import timedelta
import torch.distributed as dist
from pgmesh import ProcessGroupMesh, WorldError
from tests.support.worlds import check_sums, groups_of

class Wrapping(dist.Store):
    "A store in Python. It has what is named in the arguments."
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

def forwarded(name):
    return lambda self, *args: getattr(self.inner, name)(*args)

for name in sys.argv[1:]:
    setattr(Wrapping, name, forwarded(name))
store = Wrapping(dist.HashStore())
dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
try:
    mesh = ProcessGroupMesh(dp=1)
    check_sums(groups_of(mesh))
    print("sums")
except WorldError as error:
    print(error)
"""

NEEDED = ("set", "get", "check", "wait", "add", "append", "compare_set", "delete_key")

FILE_STORE = """
import os, sys
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from pgmesh import ProcessGroupMesh
from tests.support.faults import set_flag, wait_for_flag
from tests.support.worlds import check_sums, groups_of

rank, path, end = int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2]
store = dist.FileStore(str(path), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
mesh, unused = ProcessGroupMesh(dp=2, name="actor"), ProcessGroupMesh(dp=2, name="unused")
check_sums(groups_of(mesh))
pending = mesh.group("dp", tag="not used")
dist.barrier()
if end == "close":
    mesh.close()
if end in ("close", "destroy"):
    dist.destroy_process_group()
if rank == 0:
    if end != "exit":
        wait_for_flag(path.parent, "done")
    path.unlink(missing_ok=True)
    set_flag(path.parent, "removed")
else:
    set_flag(path.parent, "done")
    wait_for_flag(path.parent, "removed")
print("file" if path.exists() else "gone")
"""


@pytest.mark.parametrize("lacking", [(), ("compare_set",), ("append", "compare_set", "delete_key")])
def test_python_store_is_used_or_its_lack_named(lacking: tuple[str, ...], tmp_path: Path):
    has = [name for name in NEEDED if name not in lacking]
    [(out, _)] = run_programs(tmp_path, PYTHON_STORE, *has, environs=[clean_env()])
    if lacking:
        assert f"which lacks {', '.join(lacking)}." in out
        assert "__main__.Wrapping" in out
    else:
        assert out == "sums\n"


@pytest.mark.parametrize("end", ["exit", "destroy", "close"])
def test_removed_file_of_file_store_stays_gone(end: str, tmp_path: Path):
    """Also when the processes exit, which come later."""
    path = tmp_path / "store"
    environs = [clean_env(RANK=f"{rank}") for rank in range(2)]
    outputs = run_programs(tmp_path, FILE_STORE, str(path), end, environs=environs)
    assert [out for out, _ in outputs] == ["gone\n"] * 2, outputs
    assert not path.exists()
