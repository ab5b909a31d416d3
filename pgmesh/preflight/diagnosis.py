"""Findings of ``pgmesh doctor`` on one process: launcher, torch, network and store, each with a fix if it is bad.

No other rank is needed: one TCP connection to the store is opened and closed, without data. This file works without
torch; a torch that cannot be imported is a finding.
"""

from __future__ import annotations

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

from pgmesh._util.formatting import count_of, format_seconds
from pgmesh._util.torch_versions import TRIED_ON
from pgmesh.errors import LaunchError, UnsupportedTorchError
from pgmesh.launch.detect import LAST_PORT, LAUNCHERS, LauncherInfo, detect_launcher

BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        mark: "ok", "warn", "bad", or "--" for information.
        what: the subject: launcher, python, torch, numpy, seam (private names of torch), host, interface or store.
        text: the finding in one sentence.
        fix: the suggested action; empty if there is none.
    """

    mark: str
    what: str
    text: str
    fix: str = ""


def diagnose(environ: Mapping[str, str], seconds: float) -> list[Finding]:
    """All findings.

    Args:
        environ: the environment variables, such as ``os.environ``.
        seconds: timeout of each network operation.
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
    """The detected launcher, and findings about it and about the variables of other launchers.

    >>> environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "SLURM_PROCID": "0"}
    >>> launcher, findings = launcher_findings(environ)
    >>> for finding in findings:
    ...     print(finding.mark, finding.text)
    ok rank 1 of 2, local rank 1: MPICH, because PMI_RANK is set
    -- read: PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1
    -- variables of Slurm, which are not used: SLURM_PROCID=0
    """
    try:
        launcher = detect_launcher(environ)
    except LaunchError as error:
        problem, _, rest = str(error).partition("\n\n")
        return None, [Finding("bad", "launcher", problem.rstrip(":") + "." * (problem[-1] not in ".:"), rest)]
    read = dict(launcher.read)
    variables = {"read": read}
    for other in LAUNCHERS:
        if other.name != launcher.launcher:
            ignored = {name: environ[name] for name in other.marks if name in environ and name not in read}
            variables[f"variables of {other.name}, which are not used"] = ignored
    findings = [Finding("ok", "launcher", launcher.line)]
    for title, values in variables.items():
        if values:
            text = " ".join(f"{name}={value}" for name, value in values.items())
            findings.append(Finding("--", "launcher", f"{title}: {text}"))
    return launcher, findings


# -- torch ------------------------------------------------------------------------------------------------------------


def torch_findings(load: Callable[[str], Any]) -> Iterator[Finding]:
    """Findings about torch: its version, its backends, a missing numpy, and the private names that pgmesh uses."""
    try:
        torch, dist = load("torch"), load("torch.distributed")
    except Exception as error:  # besides ImportError, an incompatible library can raise anything
        text = f"torch cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        yield Finding("bad", "torch", text, "pip install torch; pgmesh plan and show work without it")
        return
    version = f"torch {torch.__version__}"
    if not dist.is_available():
        yield Finding("bad", "torch", f"{version} was built without torch.distributed", "install a build with it")
        return
    backends = [name for name in BACKENDS if dist.is_backend_available(name)]
    devices = torch.cuda.device_count()
    fix = "there are CUDA devices, but no NCCL: install a build of torch with NCCL"
    fix = fix if devices and "nccl" not in backends else ""
    text = f"{version} with {', '.join(backends) or 'no backend'}; {count_of(devices, 'CUDA device')}"
    yield Finding("warn" if fix else "ok", "torch", text, fix)
    try:
        torch.zeros(1).numpy()
    except Exception as error:  # numpy is missing, or too old for this torch
        text = f"torch cannot use numpy ({error}), so its object collectives fail, such as all_gather_object, and so do"
        yield Finding("warn", "numpy", f"{text} checkpoints", "pip install numpy")
    try:
        private = load("pgmesh.torch_private")
    except (UnsupportedTorchError, ImportError) as error:
        problem, *names = str(error).splitlines()
        yield Finding("bad", "seam", problem, "\n".join([*names, f"install torch {TRIED_ON[-1]}"]).strip())
        return
    tried = any(version.startswith(f"torch {number}.") for number in TRIED_ON)
    fix = "" if tried else f"pgmesh was tested with torch {', '.join(TRIED_ON)}: run its tests with this version"
    text = f"all {len(private.SEAM)} private names of torch that pgmesh uses exist"
    yield Finding("warn" if fix else "ok", "seam", text, fix)


# -- the network ------------------------------------------------------------------------------------------------------


def host_findings(seconds: float, launcher: LauncherInfo | None) -> Iterator[Finding]:
    """Findings about the addresses of this host's name."""
    name = socket.gethostname()
    answer = call_with_timeout(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), seconds)
    if isinstance(answer, Exception):
        text = f"the host name {name} does not resolve: {_error_text(answer)}"
        yield Finding("warn", "host", text, f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME")
        return
    addresses = list(dict.fromkeys(str(each[4][0]) for each in answer))
    text = f"the host name {name} resolves to {', '.join(addresses)}"
    several = launcher is not None and launcher.local_size is not None and launcher.local_size < launcher.size
    local = all(address == "::1" or address.startswith("127.") for address in addresses)
    if several and local and not os.environ.get("GLOO_SOCKET_IFNAME"):
        fix = "some ranks are on other hosts: set GLOO_SOCKET_IFNAME to the interface that connects to them"
        yield Finding("bad", "host", f"{text}, which other hosts cannot reach", fix)
    else:
        yield Finding("ok", "host", text)


def interface_findings(environ: Mapping[str, str], interfaces: Sequence[str]) -> Iterator[Finding]:
    """Findings about the interfaces that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME select.

    >>> environ = {"GLOO_SOCKET_IFNAME": "eth0,ib0", "NCCL_SOCKET_IFNAME": "^lo"}
    >>> for finding in interface_findings(environ, ["lo", "eth0"]):
    ...     print(finding.mark, finding.text)
    bad GLOO_SOCKET_IFNAME is eth0,ib0, but there is no interface ib0; there are lo, eth0
    ok NCCL_SOCKET_IFNAME is ^lo: eth0
    """
    there = ", ".join(interfaces)
    gloo, nccl = environ.get("GLOO_SOCKET_IFNAME", ""), environ.get("NCCL_SOCKET_IFNAME", "")
    missing = [name for name in gloo.split(",") if name and name not in interfaces]
    if missing:
        text = f"GLOO_SOCKET_IFNAME is {gloo}, but there is no interface {', '.join(missing)}; there are {there}"
        yield Finding("bad", "interface", text, "set it to an interface of this host, or unset it")
    elif gloo:
        yield Finding("ok", "interface", f"GLOO_SOCKET_IFNAME is {gloo}")
    selected = nccl_interfaces(nccl, interfaces)
    if nccl and not selected:
        text = f"NCCL_SOCKET_IFNAME is {nccl}, which matches no interface of {there}"
        yield Finding("bad", "interface", text, "set it to the prefix of an interface, or unset it")
    elif nccl:
        yield Finding("ok", "interface", f"NCCL_SOCKET_IFNAME is {nccl}: {', '.join(selected)}")
    if not gloo and not nccl:
        text = f"interfaces: {there}; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are not set"
        yield Finding("--", "interface", text)


def nccl_interfaces(setting: str, interfaces: Sequence[str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME selects: prefixes; exact names after "="; all others after "^".

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
    """Findings about the store: rank 0 must be able to host it, and every other rank to reach it."""
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
    """True if this process must host the store: on rank 0, unless torchrun's agent or a StoreProcess hosts it."""
    return launcher.rank == 0 and not _is_hosted(environ)


def wait_for_store(environ: Mapping[str, str], launcher: LauncherInfo, seconds: float) -> Finding | None:
    """Wait until this process can reach the store, or can host it.

    Args:
        environ: the environment variables, such as ``os.environ``.
        launcher: the detected launcher, with the address of the store.
        seconds: timeout. A problem that waiting cannot solve is returned immediately.

    Returns:
        None on success; otherwise the problem, as in ``store_findings``.
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
    text = f"no process listened at {where} in {format_seconds(seconds)}: rank 0, which hosts the store, did not start"
    return None if is_final else Finding("bad", "store", text, "start rank 0, and check its output for errors")


POLL_INTERVAL = 0.2
"""Seconds between two attempts to reach the store."""


def _is_hosted(environ: Mapping[str, str]) -> bool:
    """True if a process other than the ranks hosts the store. torch uses the same variable."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _check_store(environ: Mapping[str, str], launcher: LauncherInfo, seconds: float) -> tuple[Finding, bool]:
    """A finding about the store, and True if waiting cannot change it."""
    address, port = launcher.end_point()
    answer = call_with_timeout(lambda: socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM), seconds)
    if isinstance(answer, Exception):
        text = f"the name {address} cannot be resolved: {_error_text(answer)}"
        return Finding("bad", "store", text, ADDRESS_FIX), False
    if hosts_store(environ, launcher):
        return _check_hosting(address, port, answer), True
    where = f"{address}:{port}"
    answer = call_with_timeout(lambda: socket.create_connection((address, port), seconds).close(), seconds)
    if not isinstance(answer, Exception):
        return Finding("ok", "store", f"a process listens at {where}"), True
    if isinstance(answer, ConnectionRefusedError) and not _is_hosted(environ):
        text = f"the host of {where} can be reached; rank 0 has not joined yet, so no process listens there"
        return Finding("ok", "store", text), False
    fix = "check that MASTER_ADDR names rank 0's host, and that no firewall blocks the port"
    return Finding("bad", "store", f"{where} cannot be reached: {_error_text(answer)}", fix), False


ADDRESS_FIX = "set MASTER_ADDR to a name or an address of rank 0's host, the same on every rank"


def _check_hosting(address: str, port: int, infos: Sequence[tuple[Any, ...]]) -> Finding:
    """A finding about rank 0: the port must be free, and an interface of this host must have the address."""
    error = _port_error(port)
    if error is not None:
        text = f"this process, rank 0, cannot listen at port {port}: {_error_text(error)}"
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} is taken on this host, where this process, rank 0, must host the store"
        first = max(port, 1023) + 1
        free = next((near for near in range(first, min(first + 100, LAST_PORT)) if _port_error(near) is None), None)
        call = "set MASTER_PORT to another" if free is None else f"export MASTER_PORT={free}   # is free here"
        return Finding("bad", "store", text, f"{call}; the same on every rank")
    if all(_bind_error(family, socket_address) for family, _, _, _, socket_address in infos):
        resolved = ", ".join(dict.fromkeys(str(socket_address[0]) for *_, socket_address in infos))
        named = address if resolved == address else f"{address} ({resolved})"
        text = f"no interface of this host has the address {named}, but this process, rank 0, hosts the store"
        fix = f"{ADDRESS_FIX}; the name of this host is {socket.gethostname()}"
        return Finding("bad", "store", text, fix)
    text = f"port {port} is free on this host, {address}; this process, rank 0, listens there after it joins"
    return Finding("ok", "store", text)


def _port_error(port: int) -> OSError | None:
    """The error of listening at a port of all interfaces, as torch's store does; None if it is possible."""
    return _bind_error(socket.AF_INET6, ("::", port)) and _bind_error(socket.AF_INET, ("0.0.0.0", port))


def _bind_error(family: int, socket_address: tuple[Any, ...]) -> OSError | None:
    """The error of binding a socket; None if it is possible. The socket does not listen, so nothing can connect."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.bind(socket_address)
    except OSError as error:
        return error
    return None


def _error_text(error: Exception) -> str:
    """Text of an error, without its number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def call_with_timeout(function: Callable[[], Any], seconds: float) -> Any:
    """The result of a function, or its exception, or a TimeoutError. Name resolution has no timeout of its own."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(function())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else TimeoutError(f"no answer in {format_seconds(seconds)}")
