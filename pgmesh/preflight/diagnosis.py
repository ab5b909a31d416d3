"""What this process finds around it, without joining anybody: launcher, torch, network, store; and what to do about it.

Nothing here needs torch to be there: where it cannot be imported, that is a finding.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pgmesh._util.formatting import count_of
from pgmesh.errors import LaunchError, SeamError
from pgmesh.launch.detect import LAST_PORT, LAUNCHERS, LauncherInfo, detect_launcher

TRIED_ON = "2.13"
"""As ``groups.TRIED_ON``, which is not there where it would be needed."""

BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        mark: "ok", "warn" or "bad"; "--" for what is only told.
        what: launcher, python, torch, seam, host, interface or store.
        says: in a sentence.
        mend: what to do about it; "" for nothing.
    """

    mark: str
    what: str
    text: str
    fix: str = ""


def diagnose(environ: Mapping[str, str], seconds: float) -> list[Finding]:
    """All of it.

    Args:
        environ: as ``os.environ`` is.
        seconds: how long each question to the network may take.
    """
    launcher, findings = launcher_findings(environ)
    return [
        *findings,
        Finding("--", "python", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"),
        *torch_findings(importlib.import_module),
        *host_findings(seconds, launcher),
        *interface_findings(environ, [name for _, name in socket.if_nameindex()]),
        *store_findings(environ, launcher, seconds),
    ]


# -- the launcher -----------------------------------------------------------------------------------------------------


def launcher_findings(environ: Mapping[str, str]) -> tuple[LauncherInfo | None, list[Finding]]:
    """Who is believed, and what else is there.

    >>> environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "SLURM_PROCID": "0"}
    >>> launcher, findings = launcher_findings(environ)
    >>> for finding in findings:
    ...     print(finding.mark, finding.text)
    ok rank 1 of 2, local rank 1: MPICH, because PMI_RANK is set
    -- read: PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1
    -- there too, of Slurm, and not believed: SLURM_PROCID=0
    """
    try:
        launcher = detect_launcher(environ)
    except LaunchError as error:
        problem, _, rest = str(error).partition("\n\n")
        return None, [Finding("bad", "launcher", problem.rstrip(":") + "." * (problem[-1] not in ".:"), rest)]
    findings = [Finding("ok", "launcher", launcher.line)]
    if launcher.read:
        variables = " ".join(f"{name}={value}" for name, value in launcher.read)
        findings.append(Finding("--", "launcher", f"read: {variables}"))
    read = {name for name, _ in launcher.read}
    for other in LAUNCHERS:
        variables = " ".join(f"{name}={environ[name]}" for name in other.marks if name in environ.keys() - read)
        if variables and other.name != launcher.launcher:
            findings.append(Finding("--", "launcher", f"there too, of {other.name}, and not believed: {variables}"))
    return launcher, findings


# -- torch ------------------------------------------------------------------------------------------------------------


def torch_findings(load: Callable[[str], Any]) -> Iterator[Finding]:
    """torch's version and backends, and the private names that pgmesh makes groups with."""
    try:
        torch, dist = load("torch"), load("torch.distributed")
    except Exception as error:  # an ImportError, or whatever a library that does not fit raises
        text = f"torch cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        yield Finding("bad", "torch", text, "pip install torch; pgmesh plan and show go without it")
        return
    if not dist.is_available():
        yield Finding(
            "bad", "torch", f"torch {torch.__version__} was built without torch.distributed", "install another"
        )
        return
    backends = [name for name in BACKENDS if dist.is_backend_available(name)]
    devices = torch.cuda.device_count()
    text = f"torch {torch.__version__} with {', '.join(backends) or 'no backend'}; {count_of(devices, 'CUDA device')}"
    if devices and "nccl" not in backends:
        yield Finding(
            "warn", "torch", text, "there are CUDA devices, and no NCCL: install a build of torch that has it"
        )
    else:
        yield Finding("ok", "torch", text)
    try:
        private = load("pgmesh.torch_private")
    except (SeamError, ImportError) as error:
        problem, *names = str(error).splitlines()
        yield Finding("bad", "seam", problem, "\n".join([*names, f"install torch {TRIED_ON}"]).strip())
        return
    tried = any(str(torch.__version__).startswith(f"{version}.") for version in private.TRIED_ON)
    text = f"all {len(private.SEAM)} private names of torch that groups are made with are there"
    if tried:
        yield Finding("ok", "seam", text)
    else:
        fix = f"pgmesh was tried on torch {', '.join(private.TRIED_ON)}: run its tests with this one"
        yield Finding("warn", "seam", text, fix)


# -- the network ------------------------------------------------------------------------------------------------------


def host_findings(seconds: float, launcher: LauncherInfo | None) -> Iterator[Finding]:
    """What this host's name means."""
    name = socket.gethostname()
    answer = call_with_timeout(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), seconds)
    if isinstance(answer, Exception):
        text = f"this host calls itself {name}, which is no address: {_error_text(answer)}"
        yield Finding("warn", "host", text, f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME")
        return
    addresses = list(dict.fromkeys(str(each[4][0]) for each in answer))
    text = f"this host calls itself {name}, which is {', '.join(addresses)}"
    several = launcher is not None and launcher.local_size is not None and launcher.local_size < launcher.size
    if several and all(_is_local(address) for address in addresses) and not os.environ.get("GLOO_SOCKET_IFNAME"):
        fix = "there are ranks on other hosts: set GLOO_SOCKET_IFNAME to the interface that leads to them"
        yield Finding("bad", "host", f"{text}: no other host can reach that", fix)
    else:
        yield Finding("ok", "host", text)


def interface_findings(environ: Mapping[str, str], interfaces: Sequence[str]) -> Iterator[Finding]:
    """Whether the interfaces that Gloo and NCCL are told to use exist.

    >>> environ = {"GLOO_SOCKET_IFNAME": "eth0,ib0", "NCCL_SOCKET_IFNAME": "^lo"}
    >>> for finding in interface_findings(environ, ["lo", "eth0"]):
    ...     print(finding.mark, finding.text)
    bad GLOO_SOCKET_IFNAME is eth0,ib0, but there is no interface ib0; there are lo, eth0
    ok NCCL_SOCKET_IFNAME is ^lo: eth0
    """
    gloo = environ.get("GLOO_SOCKET_IFNAME", "")
    names = [name for name in gloo.split(",") if name]
    missing = [name for name in names if name not in interfaces]
    if missing:
        text = f"GLOO_SOCKET_IFNAME is {gloo}, but there is no interface {', '.join(missing)}"
        text += f"; there are {', '.join(interfaces)}"
        yield Finding("bad", "interface", text, "set it to one of them on this host, or unset it")
    elif names:
        yield Finding("ok", "interface", f"GLOO_SOCKET_IFNAME is {gloo}")
    nccl = environ.get("NCCL_SOCKET_IFNAME", "")
    if nccl:
        left = nccl_interfaces(nccl, interfaces)
        if left:
            yield Finding("ok", "interface", f"NCCL_SOCKET_IFNAME is {nccl}: {', '.join(left)}")
        else:
            text = f"NCCL_SOCKET_IFNAME is {nccl}, which leaves no interface of {', '.join(interfaces)}"
            yield Finding("bad", "interface", text, "set it to the beginning of one of them, or unset it")
    if not names and not nccl:
        text = f"interfaces: {', '.join(interfaces)}; none is chosen by GLOO_ or NCCL_SOCKET_IFNAME"
        yield Finding("--", "interface", text)


def nccl_interfaces(setting: str, interfaces: Sequence[str]) -> list[str]:
    """The interfaces that NCCL may use: by how they begin, exactly after "=", all others after "^".

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname

    >>> nccl_interfaces("eth", ["lo", "eth0", "eth1"]), nccl_interfaces("=eth", ["eth0"])
    (['eth0', 'eth1'], [])
    >>> nccl_interfaces("^=eth0", ["eth0", "eth01"])
    ['eth01']
    """
    exclude, exact = setting.startswith("^"), setting.lstrip("^").startswith("=")
    words = [word for word in setting.lstrip("^=").split(",") if word]
    matches = {name for name in interfaces if any(name == word if exact else name.startswith(word) for word in words)}
    return [name for name in interfaces if (name in matches) != exclude]


# -- the store --------------------------------------------------------------------------------------------------------


def store_findings(environ: Mapping[str, str], launcher: LauncherInfo | None, seconds: float) -> Iterator[Finding]:
    """Whether this process can reach the store; on the rank that is to host it, whether it can."""
    if launcher is None:
        return
    if launcher.size == 1 and launcher.address is None:
        yield Finding("--", "store", "a world of one needs no store")
        return
    try:
        launcher.end_point()
    except LaunchError as error:
        problem, _, rest = str(error).partition("\n\n")
        yield Finding("bad", "store", problem, rest)
        return
    yield _check_store(environ, launcher, seconds)[0]


def hosts_store(environ: Mapping[str, str], launcher: LauncherInfo) -> bool:
    """Whether this process hosts its world's store: rank 0 does, unless torchrun's agent or a StoreProcess does."""
    return launcher.rank == 0 and not _is_hosted(environ)


def wait_for_store(environ: Mapping[str, str], launcher: LauncherInfo, seconds: float) -> Finding | None:
    """Wait until this process can reach the store, or host it.

    Args:
        environ: as ``os.environ`` is.
        found: where the store is.
        seconds: how long to ask. What cannot change meanwhile is not waited for.

    Returns:
        None once it can; else what is wrong, as ``store_findings`` says it.
    """
    end = time.monotonic() + seconds
    while True:
        finding, is_final = _check_store(environ, launcher, max(end - time.monotonic(), POLL_INTERVAL))
        if is_final or time.monotonic() + POLL_INTERVAL > end:
            break
        time.sleep(POLL_INTERVAL)
    if finding.mark != "ok":
        return finding
    where = "{}:{}".format(*launcher.end_point())
    text = f"nobody listened at {where} in {seconds:g} s: rank 0, which hosts the store, did not start"
    return None if is_final else Finding("bad", "store", text, "start rank 0, and see that it ends with no error")


POLL_INTERVAL = 0.2
"""Seconds between two looks for the store."""


def _is_hosted(environ: Mapping[str, str]) -> bool:
    """Whether a process that started before the ranks hosts the store. torch tells it by this variable too."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _check_store(environ: Mapping[str, str], launcher: LauncherInfo, seconds: float) -> tuple[Finding, bool]:
    """What is found of the store, and whether it will stay so."""
    address, port = launcher.end_point()
    answer = call_with_timeout(lambda: socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM), seconds)
    if isinstance(answer, Exception):
        text = f"the name {address} cannot be resolved: {_error_text(answer)}"
        return Finding("bad", "store", text, ADDRESS_FIX), False
    if hosts_store(environ, launcher):
        return _check_hosting(address, port, answer), True
    where = f"{address}:{port}"
    answer = call_with_timeout(lambda: _connect(address, port, seconds), seconds)
    if not isinstance(answer, Exception):
        return Finding("ok", "store", f"somebody listens at {where}"), True
    if isinstance(answer, ConnectionRefusedError) and not _is_hosted(environ):
        text = f"nobody listens at {where} yet, which can be reached"
        return Finding("ok", "store", f"{text}: rank 0 does once it joins"), False
    fix = "see that MASTER_ADDR names rank 0's host, and that no firewall is between"
    return Finding("bad", "store", f"{where} cannot be reached: {_error_text(answer)}", fix), False


ADDRESS_FIX = "set MASTER_ADDR to a name or an address of rank 0's host, the same on every rank"


def _check_hosting(address: str, port: int, infos: Sequence[tuple[Any, ...]]) -> Finding:
    """Whether this process, rank 0, can host the store, and this host has the address by which others look for it."""
    error = _port_error(port)
    if error is not None:
        text = f"this process, rank 0, cannot listen at port {port}: {_error_text(error)}"
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} is taken on this host, where this process, rank 0, is to host the store"
        first = max(port, 1023) + 1
        free = next((near for near in range(first, min(first + 100, LAST_PORT)) if _port_error(near) is None), None)
        call = "set MASTER_PORT to another" if free is None else f"export MASTER_PORT={free}   # is free here"
        return Finding("bad", "store", text, f"{call}; the same on every rank")
    if all(_bind_error(family, socket_address) for family, _, _, _, socket_address in infos):
        resolved = ", ".join(dict.fromkeys(str(socket_address[0]) for *_, socket_address in infos))
        named = address if resolved == address else f"{address} ({resolved})"
        text = f"no interface of this host has the address {named}, but this process, rank 0, hosts the store"
        fix = f"{ADDRESS_FIX}; this host calls itself {socket.gethostname()}"
        return Finding("bad", "store", text, fix)
    text = f"port {port} is free on this host, {address}: this process, rank 0, listens there once it joins"
    return Finding("ok", "store", text)


def _port_error(port: int) -> OSError | None:
    """Why this process cannot listen at a port of all interfaces, as torch's store does; None if it can."""
    return _bind_error(socket.AF_INET6, ("::", port)) and _bind_error(socket.AF_INET, ("0.0.0.0", port))


def _bind_error(family: int, socket_address: tuple[Any, ...]) -> OSError | None:
    """Why a socket cannot be bound there; None if it can. It does not listen, so nothing can connect to it."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.bind(socket_address)
    except OSError as error:
        return error
    return None


def _connect(address: str, port: int, seconds: float) -> None:
    with contextlib.closing(socket.create_connection((address, port), timeout=seconds)):
        pass


def _is_local(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _error_text(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def call_with_timeout(function: Callable[[], Any], seconds: float) -> Any:
    """The answer, or the error; a TimeoutError where there is none in time. A resolver has no deadline of its own."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(function())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else TimeoutError(f"no answer in {seconds:g} s")
