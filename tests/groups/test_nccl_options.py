"""The options that NCCL's backend is created with, tested on a torch without NCCL.

A stand-in replaces torch's ``ProcessGroupNCCL``. The effect of the options on NCCL is untested.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pgmesh import OptionsError, ProcessGroupMesh, recipes, torch_private
from tests.support.fake_world import fake_rank
from tests.support.message_assertions import assert_raises
from tests.support.nccl_stand_in import NCCL_SETTINGS, OPTIONS_YAML, StandIn, options_by_name, stand_in_for_nccl


@pytest.fixture
def nccl() -> Iterator[type[StandIn]]:
    with stand_in_for_nccl() as stand_in:
        yield stand_in


def test_settings_in_yaml_reach_nccl(nccl: type[StandIn]):
    pytest.importorskip("yaml")
    arrangement = recipes.megatron(8, tp=2, cp=2, ep=4, etp=1, name="yaml")
    arrangement.configure_nccl(OPTIONS_YAML)
    found = options_by_name(nccl, arrangement)
    assert {name: found[name] for name in ("tensor", "data+context", "context", "expert-tensor+expert+pipeline")} == {
        "tensor": (False, {"cga_cluster_size": 2, "min_ctas": 1, "max_ctas": 4}),
        "data+context": (True, {"max_ctas": 8}),
        "context": (False, {"net_name": "Socket"}),
        "expert-tensor+expert+pipeline": (False, {"net_name": "IB"}),
    }
    with_settings = {arrangement[name].ranks() for name in found}
    assert with_settings == {(4, 5), (1, 3, 5, 7), (5, 7), (4, 5, 6, 7)}


@pytest.mark.parametrize("setting", NCCL_SETTINGS)
def test_every_setting_reaches_nccl(nccl: type[StandIn], setting: str):
    value = "IB" if setting == "net_name" else 1
    mesh = ProcessGroupMesh(dp=4, tp=2, name=setting)
    mesh.configure("tp", backend="nccl", nccl={setting: value}, high_priority=True, timeout=timedelta(seconds=7))
    mesh.group("tp")
    (options,) = nccl.made
    assert options.changed == (True, {setting: value})
    assert (options._timeout, options.global_ranks_in_group) == (timedelta(seconds=7), [4, 5])
    assert options.group_name == mesh.group("tp").group_name
    mesh.group("dp", backend="nccl")
    assert nccl.made[1].changed == (False, {})  # another family has none of it


def test_sharp_keeps_other_settings_of_its_group(nccl: type[StandIn]):
    arrangement = recipes.megatron(8, tp=2, cp=2, optimizer_instances=2, name="sharp")
    arrangement.configure_nccl({"dp_cp": {"max_ctas": 8}})
    arrangement["data+context"].configure(nccl={"collnet_enable": 1})
    arrangement["data+context"].configure(high_priority=True)
    arrangement["between instances"].configure(nccl={"collnet_enable": 1})  # there, sharp_enabled_group="dp_replica"
    arrangement["tensor"].configure(nccl={"collnet_enable": 0})
    found = options_by_name(nccl, arrangement)
    assert found["data+context"] == (True, {"max_ctas": 8, "collnet_enable": 1})
    assert found["between instances"] == (False, {"collnet_enable": 1})
    assert found["tensor"] == (False, {"collnet_enable": 0})
    assert "context" not in found


def test_setting_missing_in_this_nccl_is_refused(nccl: type[StandIn]):
    nccl.settings = tuple(name for name in NCCL_SETTINGS if name != "nvls_ctas")
    mesh = ProcessGroupMesh(dp=4, tp=2, name="old")
    assert_raises(
        OptionsError,
        lambda: mesh.group("tp", backend="nccl", nccl={"nvls_ctas": 4}),
        f"this torch's NCCL has no setting nvls_ctas; it has {', '.join(sorted(nccl.settings))}.",
    )
    assert mesh.group("tp", backend="nccl", nccl={"max_ctas": 4}).size() == 2


def test_torch_without_nccl_refuses_the_backend():
    if dist.is_nccl_available():
        pytest.skip("this torch has NCCL")
    with fake_rank(5, 8):
        mesh = ProcessGroupMesh(dp=4, tp=2, name="without")
        assert_raises(
            OptionsError, lambda: mesh.group("tp", backend="nccl"), "this torch was built without backend nccl."
        )


@pytest.mark.parametrize("bound", [False, True], ids=["unbound", "bound to a device"])
@pytest.mark.parametrize(
    ("world", "backends"),
    [
        ("nccl", {"cuda": "nccl"}),
        ("cpu:gloo,cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}),
        ("undefined", {"cuda": "nccl"}),  # init_process_group without a backend, on a host with a GPU
    ],
)
def test_group_has_the_backends_of_the_world(
    nccl: type[StandIn], monkeypatch: pytest.MonkeyPatch, world: str, backends: dict[str, str], bound: bool
):
    monkeypatch.setattr(torch_private, "backend_name", lambda group: world)
    monkeypatch.setattr(torch_private, "default_timeout", lambda backend: timedelta(minutes=10))
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    default: Any = dist.group.WORLD
    default.bound_device_id = torch.device("cuda", 0) if bound else None  # as init_process_group(device_id=...) does
    with mock.patch.object(dist, "split_group", side_effect=AssertionError("splitting waits for all ranks")):
        mesh = ProcessGroupMesh(dp=4, tp=2, name=f"{world}, {bound}")
        group: Any = mesh.group("tp")
    found = {device.type: type(group._get_backend(device)).__name__ for device in torch_private.device_types(group)}
    kinds = {"gloo": "ProcessGroupGloo", "nccl": "FakeProcessGroup"}  # the stand-in creates these
    assert found == {device: kinds[backend] for device, backend in backends.items()}
    assert {*dist.get_backend_config(group).split(",")} == {f"{device}:{name}" for device, name in backends.items()}
    (options,) = nccl.made
    assert not hasattr(options, "split_from")
    assert mesh.group("tp", backend="gloo") is not group
    assert len(nccl.made) == 1  # no NCCL in a group on Gloo
