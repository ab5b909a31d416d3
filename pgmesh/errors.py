"""The exceptions of pgmesh. Each message has the problem, the numbers, and a corrected call where there is one.

PgmeshError
├── ShapeError             (ValueError)              sizes, ranks, names or hosts that are invalid or do not fit
├── AxisError              (ValueError, IndexError)  an axis the mesh does not have, or one named twice
├── RankError              (ValueError, IndexError)  a rank, coord or index that is invalid or outside the mesh
├── OptionsError           (ValueError)              an invalid option, tag or timeout
├── MembershipError        (RuntimeError)            this rank is not a member of the group or mesh
├── WorldError             (RuntimeError)            the world or its store is missing, lost or unsuitable
├── NameTakenError         (RuntimeError)            an open mesh has this name already
├── LifetimeError          (RuntimeError)            an operation after release, close or fork, or in the wrong state
├── MismatchError          (RuntimeError)            ranks describe one mesh or group differently
├── MissingRanksError      (TimeoutError)            members that did not arrive in time, or wait for each other
├── MethodError            (RuntimeError)            a parallel method that failed or was not found
├── UnsupportedTorchError  (RuntimeError)            a second copy of pgmesh, or a package in an unknown version
└── LaunchError            (RuntimeError)            a launcher or a spawned rank failed
"""

from __future__ import annotations


class PgmeshError(Exception):
    """Base class of all exceptions that pgmesh raises on purpose."""


class ShapeError(PgmeshError, ValueError):
    """Sizes, ranks, names or hosts that are invalid or do not fit."""


class AxisError(PgmeshError, ValueError, IndexError):
    """An axis the mesh does not have, or one named twice."""


class RankError(PgmeshError, ValueError, IndexError):
    """A rank, coord or index that is invalid or outside the mesh."""


class OptionsError(PgmeshError, ValueError):
    """An invalid option, tag or timeout."""


class MembershipError(PgmeshError, RuntimeError):
    """This rank is not a member of the group or mesh."""


class WorldError(PgmeshError, RuntimeError):
    """The world or its store is missing, lost or unsuitable."""


class NameTakenError(PgmeshError, RuntimeError):
    """An open mesh has this name already."""


class LifetimeError(PgmeshError, RuntimeError):
    """An operation after release, close or fork, or in the wrong state."""


class MismatchError(PgmeshError, RuntimeError):
    """Ranks describe one mesh or group differently."""


class MissingRanksError(PgmeshError, TimeoutError):
    """Members that did not arrive in time, or wait for each other."""


class MethodError(PgmeshError, RuntimeError):
    """A parallel method that failed or was not found."""


class UnsupportedTorchError(PgmeshError, RuntimeError):
    """A second copy of pgmesh, or a package in an unknown version."""


class LaunchError(PgmeshError, RuntimeError):
    """A launcher or a spawned rank failed."""


for _error in (PgmeshError, *PgmeshError.__subclasses__()):
    _error.__module__ = "pgmesh"  # tracebacks show the public path, such as pgmesh.ShapeError
