"""Tests of ``pgmesh doctor``: its findings in prepared environments, also without torch, and its timeouts."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from pgmesh.__main__ import main
from pgmesh._util.torch_versions import TRIED_ON
from pgmesh.launch.detect import LAUNCHERS
from pgmesh.launch.launcher import LauncherInfo
from pgmesh.preflight import diagnosis
from pgmesh.preflight.diagnosis import Finding
from tests.support.message_assertions import without_hostname_warnings
from tests.support.programs import free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    names = {mark for launcher in LAUNCHERS for mark in launcher.marks}
    for name in {*names, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PGMESH_SPAWNED"}:
        monkeypatch.delenv(name, raising=False)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


UNTESTED = r"warn +torch: pgmesh was not tested with torch .*\n +install torch \S+, or run the tests of pgmesh\n"
"""The finding about a version of torch that pgmesh was not tested on."""


def said(capsys, line: str, status: int) -> str:
    assert main(["doctor", *line.split()]) == status
    out, err = capsys.readouterr()
    assert err == ""
    return out


def brief(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(finding.mark, finding.text) for finding in findings]


def found(**more) -> LauncherInfo:
    return LauncherInfo("torchrun", "RANK is set", **{"rank": 0, "size": 2, "local_rank": 0, "local_size": 2, **more})


def test_json_has_each_bad_finding(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    data = json.loads(said(capsys, "--json", 1))
    assert data["status"] == "bad"
    assert [finding["what"] for finding in data["findings"] if finding["mark"] == "bad"] == ["launcher", "interface"]


def shape(text: str) -> str:
    """Output without line wrapping and without the versions of Python and torch."""
    flat = re.sub(r"\n {6}(?! )", " ", text)
    flat = re.sub(r"Python \S+ on \S+ \S+", "Python V on S M", flat)
    flat = re.sub(r"torch \S+ with [^;]+; \d+ CUDA devices?", "torch V with B; N CUDA devices", flat)
    return re.sub(UNTESTED, "", flat)


HEALTHY = """\
ok    launcher: rank 0 of 1, local rank 0 of 1: no launcher, because no
      launcher's variables are set
--    python: Python 3.11.7 on Linux x86_64
ok    torch: torch 2.13.0+cpu with gloo; 0 CUDA devices
ok    host: the host name n1 resolves to 10.0.0.1
--    interface: interfaces: lo, eth0; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME
      are not set
--    store: a world of one needs no store
"""


def test_doctor_output_has_the_form_in_the_docs(capsys, monkeypatch):
    docs = (ROOT / "docs" / "preflight.md").read_text(encoding="utf-8")
    (sample,) = re.findall(r"```\n\$ ((?:\w+=\S+ )*)pgmesh doctor\n(.*?)```", docs, flags=re.DOTALL)
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("10.0.0.1", 0))])
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    for given, shown in (sample, ("", HEALTHY)):
        with mock.patch.dict(os.environ, dict(word.split("=") for word in given.split())):
            text = said(capsys, "", int("bad  " in shown))
            assert max(map(len, text.splitlines())) <= 80
            assert shape(text) == shape(shown)


# ---- without torch, and with another one ----


def run_without(module: str, script: str, status: int) -> subprocess.CompletedProcess[str]:
    """Run a script that calls ``main``, without a module. Its standard output is on one line for each finding."""
    hide = f"import sys; sys.modules[{module!r}] = None; from pgmesh.__main__ import main\n"
    ran = subprocess.run([sys.executable, "-c", hide + script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == status, ran.stderr
    ran.stdout = re.sub(r"\n {6,8}", " ", ran.stdout)
    return ran


def test_doctor_and_check_fail_alike_without_torch():
    ran = run_without("torch", "sys.exit(main(['doctor']) and main(['check', 'dp=2']))", 1)
    text = "torch cannot be imported: ModuleNotFoundError: import of torch halted; None in sys.modules"
    fix = "pip install torch   # pgmesh plan and show work without it"
    assert f"bad   torch: {text} {fix}" in ran.stdout
    assert ran.stderr == f"pgmesh check: {text}\n\n  {fix}\n"
    assert "store:" in ran.stdout
    assert "cannot create groups" not in ran.stdout


def test_doctor_names_what_fails_without_numpy():
    script = """
status = main(["doctor"])
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    dist.all_gather_object([None], "an object")
except RuntimeError as error:
    print(f"all_gather_object: {error}")
dist.destroy_process_group()
sys.exit(status)
"""
    ran = run_without("numpy", script, 0)
    assert without_hostname_warnings(ran.stderr) == ""
    assert (
        "warn  numpy: torch cannot use numpy (Numpy is not available), so its object collectives fail, such as "
        "all_gather_object, and so do checkpoints pip install numpy\n"
    ) in ran.stdout
    assert "all_gather_object: Numpy is not available" in ran.stdout


def lacking(**instead):
    def load(name: str):
        if isinstance(instead.get(name), Exception):
            raise instead[name]
        return instead.get(name) or importlib.import_module(name)

    return load


def test_torch_that_cannot_create_groups_is_bad():
    error = AttributeError("module 'torch.distributed.distributed_c10d' has no attribute '_pg_names'")
    findings = list(diagnosis.torch_findings(lacking(**{"pgmesh.torch_private": error})))
    assert [(finding.mark, finding.what) for finding in findings] == [("ok", "torch"), ("bad", "torch")]
    assert findings[1].text == f"pgmesh cannot create groups with torch {torch.__version__}"
    assert findings[1].fix == f"install torch {TRIED_ON[-1]}"


def test_untested_torch_is_a_warning():
    with mock.patch.object(diagnosis, "TRIED_ON", ("1.0",)):
        findings = list(diagnosis.torch_findings(importlib.import_module))
    assert brief(findings[1:]) == [("warn", f"pgmesh was not tested with torch {torch.__version__}")]
    assert findings[1].fix == "install torch 1.0, or run the tests of pgmesh"


def test_torch_without_distributed_or_nccl_is_reported():
    other = SimpleNamespace(__version__="2.13.0", cuda=SimpleNamespace(device_count=lambda: 4))
    dist = SimpleNamespace(is_available=lambda: False)
    load = lacking(**{"torch": other, "torch.distributed": dist})
    assert brief(diagnosis.torch_findings(load)) == [("bad", "torch 2.13.0 was built without torch.distributed")]
    dist.is_available = lambda: True
    dist.is_backend_available = lambda name: name == "gloo"
    first = next(iter(diagnosis.torch_findings(load)))
    assert (first.mark, first.text) == ("warn", "torch 2.13.0 with gloo; 4 CUDA devices")


@pytest.mark.parametrize(
    ("effect", "text"),
    [
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (lambda *_, **__: time.sleep(5), "no answer in 0.1 s"),
    ],
)
def test_unresolved_host_name_is_a_warning(effect, text):
    start = time.monotonic()
    with mock.patch.object(socket, "getaddrinfo", side_effect=effect):
        findings = brief(diagnosis.host_findings({}, 0.1, None))
    assert time.monotonic() - start < 2
    assert findings == [("warn", f"the host name {socket.gethostname()} does not resolve: {text}")]


def test_loopback_host_name_is_bad_with_several_hosts():
    local = [(0, 0, 0, "", ("127.0.1.1", 0))]
    with mock.patch.object(socket, "getaddrinfo", return_value=local):
        (alone,) = diagnosis.host_findings({}, 1.0, found())
        (several,) = diagnosis.host_findings({}, 1.0, found(size=4))
        (named,) = diagnosis.host_findings({"GLOO_SOCKET_IFNAME": "eth0"}, 1.0, found(size=4))
    assert (alone.mark, several.mark, named.mark) == ("ok", "bad", "ok")
    assert several.text.endswith("resolves to 127.0.1.1, which other hosts cannot reach")


def test_socket_variables_must_select_an_interface():
    (finding,) = diagnosis.interface_findings({"GLOO_SOCKET_IFNAME": "lo"}, ["lo"])
    assert brief([finding]) == [("ok", "GLOO_SOCKET_IFNAME is lo: lo")]
    for setting in ("^lo", "=lo", "lo,ib1"):  # of NCCL's syntax, Gloo knows the commas only
        (finding,) = diagnosis.interface_findings({"GLOO_SOCKET_IFNAME": setting}, ["lo"])
        assert brief([finding]) == [("bad", f"GLOO_SOCKET_IFNAME is {setting}, but the interfaces are lo")]


AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""The agent of torchrun listens, and rank 0 does not."""


def of_store(place: LauncherInfo, **environ: str) -> list[tuple[str, str]]:
    return brief(diagnosis.store_findings(environ, place, 2.0))


def test_store_is_reachable_or_awaited_or_unreachable():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        place = found(rank=1, address="127.0.0.1", port=port)
        assert of_store(place) == [("ok", f"a process listens at 127.0.0.1:{port}")]
        assert of_store(found(address="127.0.0.1", port=port), **AGENT) == of_store(place)
    awaited = "rank 0 has not joined yet, so no process listens there"
    assert of_store(place) == [("--", f"the host of 127.0.0.1:{port} can be reached; {awaited}")]
    (finding,) = diagnosis.store_findings(AGENT, place, 2.0)
    assert brief([finding]) == [("bad", f"127.0.0.1:{port} cannot be reached: Connection refused")]
    assert "MASTER_ADDR" in finding.fix


def test_port_of_rank_0_is_free_or_taken():
    port = free_port()
    place = found(address="127.0.0.1", port=port)
    says = f"port {port} is free on this host, 127.0.0.1; this process, rank 0, listens there after it joins"
    assert of_store(place) == [("ok", says)]
    with closing(socket.create_server(("", port))) as server:
        (finding,) = diagnosis.store_findings({}, place, 2.0)
        taken = f"this process, rank 0, hosts the store, but cannot listen at port {port}: Address already in use"
        assert brief([finding]) == [("bad", taken)]
        other = re.fullmatch(r"export MASTER_PORT=(\d+)   # the same on every rank", finding.fix)
        socket.create_server(("", int(other[1]))).close()
        client = socket.create_connection(("127.0.0.1", port))  # as a job that has just ended leaves it
        server.accept()[0].close()
        client.close()
    assert of_store(place) == [("ok", says)]


def test_store_address_of_another_host_is_bad():
    with mock.patch.object(socket, "getaddrinfo", return_value=[(socket.AF_INET, 1, 6, "", ("192.0.2.7", 0))]):
        (finding,) = diagnosis.store_findings({}, found(address="n9", port=free_port()), 2.0)
    text = "no interface of this host has the address n9 (192.0.2.7), but this process, rank 0, hosts the store"
    assert brief([finding]) == [("bad", text)]
    assert finding.fix == f"{diagnosis.ADDRESS_FIX}; the name of this host is {socket.gethostname()}"


def test_store_without_an_address_is_bad():
    (finding,) = diagnosis.store_findings({}, found(local_size=1), 0.1)
    assert finding.mark == "bad"
    assert finding.text.startswith("torchrun does not set the host and the port of rank 0")
    assert "export MASTER_ADDR=n1 MASTER_PORT=29500" in finding.fix
