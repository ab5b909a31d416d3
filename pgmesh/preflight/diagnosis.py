"""Findings of ``pgmesh doctor`` on one process: launcher, torch, network and store, each with a fix if it is bad.

No other rank is needed: one TCP connection to the store is opened and closed, without data. This file works without
torch; a torch that cannot be imported is a finding.
"""

from __future__ import annotations

import importlib
import os
import platform
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pgmesh._util.formatting import count_of, format_seconds
from pgmesh._util.timeouts import call_with_timeout
from pgmesh._util.torch_versions import TRIED_ON
from pgmesh.errors import LaunchError
from pgmesh.launch.detect import LAUNCHERS, detect_launcher
from pgmesh.launch.launcher import LAST_PORT, PORTS, LauncherInfo


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        mark: "ok", "warn", "bad", or "--" for information.
        what: the subject: launcher, python, torch, numpy, host, interface or store.
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
        *host_findings(environ, seconds, launcher),
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
    -- variables of other launchers, which are not used: SLURM_PROCID=0
    """
    try:
        launcher = detect_launcher(environ)
    except LaunchError as error:
        return None, [_finding_of("launcher", error)]
    read = dict(launcher.read)
    marks = [mark for other in LAUNCHERS if other.name != launcher.launcher for mark in other.marks]
    ignored = {mark: environ[mark] for mark in marks if mark in environ and mark not in read}
    findings = [Finding("ok", "launcher", launcher.line)]
    for title, values in (("read", read), ("variables of other launchers, which are not used", ignored)):
        if values:
            text = " ".join(f"{name}={value}" for name, value in values.items())
            findings.append(Finding("--", "launcher", f"{title}: {text}"))
    return launcher, findings


def _finding_of(what: str, error: LaunchError) -> Finding:
    """A finding with the first paragraph of an error, and the rest as its fix."""
    problem, _, rest = str(error).partition("\n\n")
    return Finding("bad", what, problem.rstrip(":"), rest)


# -- torch ------------------------------------------------------------------------------------------------------------


def torch_findings(load: Callable[[str], Any]) -> Iterator[Finding]:
    """Findings about torch: its version, its backends, a missing numpy, and whether pgmesh works with it.

    Args:
        load: imports a module.
    """
    try:
        torch, dist = load("torch"), load("torch.distributed")
    except Exception as error:  # besides ImportError, an incompatible library can raise anything
        text = f"torch cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        yield Finding("bad", "torch", text, "pip install torch   # pgmesh plan and show work without it")
        return
    version = f"torch {torch.__version__}"
    if not dist.is_available():
        yield Finding("bad", "torch", f"{version} was built without torch.distributed", "install a build with it")
        return
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
    devices = torch.cuda.device_count()
    fix = "install a build of torch with NCCL" if devices and "nccl" not in backends else ""
    text = f"{version} with {', '.join(backends) or 'no backend'}; {count_of(devices, 'CUDA device')}"
    yield Finding("warn" if fix else "ok", "torch", text, fix)
    try:
        torch.zeros(1).numpy()
    except Exception as error:  # numpy is missing, or too old for this torch
        text = f"torch cannot use numpy ({error}), so its object collectives fail, such as all_gather_object, and so do"
        yield Finding("warn", "numpy", f"{text} checkpoints", "pip install numpy")
    fix = f"install torch {TRIED_ON[-1]}"
    try:
        load("pgmesh.torch_private")
    except (AttributeError, ImportError):  # it lacks a private name
        yield Finding("bad", "torch", f"pgmesh cannot create groups with {version}", fix)
        return
    if not any(version.startswith(f"torch {number}.") for number in TRIED_ON):
        yield Finding("warn", "torch", f"pgmesh was not tested with {version}", f"{fix}, or run the tests of pgmesh")


# -- the network ------------------------------------------------------------------------------------------------------


def host_findings(environ: Mapping[str, str], seconds: float, launcher: LauncherInfo | None) -> Iterator[Finding]:
    """Findings about the addresses of this host's name."""
    name = socket.gethostname()
    try:
        infos = call_with_timeout(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), seconds)
    except (OSError, UnicodeError) as error:  # a label of more than 63 characters is no valid one
        text = f"the host name {name} does not resolve: {_error_text(error)}"
        yield Finding("warn", "host", text, f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME")
        return
    addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
    text = f"the host name {name} resolves to {', '.join(addresses)}"
    several = launcher is not None and launcher.local_size is not None and launcher.local_size < launcher.size
    local = all(address == "::1" or address.startswith("127.") for address in addresses)
    if several and local and not environ.get("GLOO_SOCKET_IFNAME"):
        fix = "some ranks are on other hosts: set GLOO_SOCKET_IFNAME to the interface that connects to them"
        yield Finding("bad", "host", f"{text}, which other hosts cannot reach", fix)
    else:
        yield Finding("ok", "host", text)


def interface_findings(environ: Mapping[str, str], interfaces: Sequence[str]) -> Iterator[Finding]:
    """Findings about the interfaces that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME select.

    >>> environ = {"GLOO_SOCKET_IFNAME": "eth0,ib0", "NCCL_SOCKET_IFNAME": "^lo"}
    >>> for finding in interface_findings(environ, ["lo", "eth0"]):
    ...     print(finding.mark, finding.text)
    bad GLOO_SOCKET_IFNAME is eth0,ib0, but the interfaces are lo, eth0
    ok NCCL_SOCKET_IFNAME is ^lo: eth0
    """
    there, gloo, nccl = ", ".join(interfaces), "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
    for name in (gloo, nccl):
        setting = environ.get(name, "")
        words = setting.split(",")  # Gloo takes each as a name, and needs all of them
        selected = nccl_interfaces(setting, interfaces) if name == nccl else [w for w in words if w in interfaces]
        if setting and len(selected) < (1 if name == nccl else len(words)):
            fix = "set it to interfaces of this host, or unset it"
            yield Finding("bad", "interface", f"{name} is {setting}, but the interfaces are {there}", fix)
        elif setting:
            yield Finding("ok", "interface", f"{name} is {setting}: {', '.join(selected)}")
    if not environ.get(gloo) and not environ.get(nccl):
        yield Finding("--", "interface", f"interfaces: {there}; {gloo} and {nccl} are not set")


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
    if not launcher.needs_store:
        yield Finding("--", "store", "a world of one needs no store")
        return
    try:
        launcher.end_point()
    except LaunchError as error:
        yield _finding_of("store", error)
        return
    yield _check_store(environ, launcher, seconds)


def hosts_store(environ: Mapping[str, str], launcher: LauncherInfo) -> bool:
    """True if this process must host the store: on rank 0, unless torchrun's agent or a StoreProcess hosts it."""
    return launcher.rank == 0 and not _is_hosted(environ)


def explain_store(environ: Mapping[str, str], launcher: LauncherInfo, seconds: float, error: Exception) -> str:
    """The reason why this process could not open the store in ``seconds``, with a fix.

    Args:
        environ: the environment variables, such as ``os.environ``.
        launcher: the detected launcher, with the address of the store.
        error: the error of torch's store.
    """
    finding = _check_store(environ, launcher, min(seconds, 3.0))
    where = "{}:{}".format(*launcher.end_point())
    text, fix = finding.text, finding.fix
    if finding.mark == "ok":
        text = f"{where} does not answer like torch's store: {str(error).splitlines()[0]}"
        other = launcher.end_point()[1] % LAST_PORT + 1
        fix = f"export MASTER_PORT={other}   # or another free port, the same on every rank"
    elif finding.mark == "--":
        text = f"no process listened at {where} in {format_seconds(seconds)}: rank 0, which hosts the store, did not "
        text, fix = f"{text}start", "start rank 0, and check its output for errors"
    return f"{text}\n\n  {fix}"


ADDRESS_FIX = "set MASTER_ADDR to a name or an address of rank 0's host, the same on every rank"


def _is_hosted(environ: Mapping[str, str]) -> bool:
    """True if a process other than the ranks hosts the store. torch uses the same variable."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _check_store(environ: Mapping[str, str], launcher: LauncherInfo, seconds: float) -> Finding:
    """The finding about a store with a known address."""
    address, port = launcher.end_point()
    try:
        infos = call_with_timeout(lambda: socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM), seconds)
    except (OSError, UnicodeError) as error:  # UnicodeError: no host can have this name
        text = f"the name {address} cannot be resolved: {_error_text(error)}"
        return Finding("bad", "store", text, ADDRESS_FIX)
    if hosts_store(environ, launcher):
        return _check_hosting(address, port, infos)
    where = f"{address}:{port}"
    try:
        call_with_timeout(lambda: socket.create_connection((address, port), seconds).close(), seconds)
    except OSError as error:
        if isinstance(error, ConnectionRefusedError) and not _is_hosted(environ):
            text = f"the host of {where} can be reached; rank 0 has not joined yet, so no process listens there"
            return Finding("--", "store", text)
        fix = "check that MASTER_ADDR names rank 0's host, and that no firewall blocks the port"
        return Finding("bad", "store", f"{where} cannot be reached: {_error_text(error)}", fix)
    return Finding("ok", "store", f"a process listens at {where}")


def _check_hosting(address: str, port: int, infos: Sequence[tuple[Any, ...]]) -> Finding:
    """The finding about rank 0: the port must be free, and an interface of this host must have the address.

    Args:
        infos: the addresses that ``address`` resolves to, as ``socket.getaddrinfo`` returns them.
    """
    if all(_listen_error(family, socket_address) for family, _, _, _, socket_address in infos):
        resolved = ", ".join(dict.fromkeys(str(socket_address[0]) for *_, socket_address in infos))
        text = f"no interface of this host has the address {address} ({resolved}), but this process, rank 0, hosts the"
        fix = f"{ADDRESS_FIX}; the name of this host is {socket.gethostname()}"
        return Finding("bad", "store", f"{text} store", fix)
    if (error := _port_error(port)) is not None:
        text = (
            f"this process, rank 0, hosts the store, but cannot listen at port {port}: {os.strerror(error.errno or 0)}"
        )
        free = next((other for other in (*range(port + 1, LAST_PORT), *PORTS) if not _port_error(other)), PORTS[0])
        return Finding("bad", "store", text, f"export MASTER_PORT={free}   # the same on every rank")
    text = f"port {port} is free on this host, {address}; this process, rank 0, listens there after it joins"
    return Finding("ok", "store", text)


def _port_error(port: int) -> OSError | None:
    """The error of listening at a port of all interfaces, as torch's store does; None if it is possible."""
    return _listen_error(socket.AF_INET6, ("::", port)) and _listen_error(socket.AF_INET, ("0.0.0.0", port))


def _listen_error(family: int, address: tuple[Any, ...]) -> OSError | None:
    """The error of listening at an address, for IPv4 too if it is of IPv6; None if it is possible."""
    is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        socket.create_server(address, family=family, dualstack_ipv6=is_dual).close()
    except OSError as error:
        return error
    return None


def _error_text(error: Exception) -> str:
    """Text of an error, without its number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
