"""The tree of errors. Each says what is wrong, the numbers, and the call that would be right.

PgmeshError
├── ShapeError         (ValueError)              sizes that do not fit the ranks
├── AxisError          (ValueError, IndexError)  an axis the mesh does not have, or one named twice
├── PlaceError         (ValueError, IndexError)  a rank, a coord or an index that is off the mesh
├── OptionsError       (ValueError)              options that no such group can be made with
├── MembershipError    (RuntimeError)            this rank is no member of what it asks for
├── WorldError         (RuntimeError)            torch.distributed is not there, or not as needed
├── NameTakenError     (RuntimeError)            a living mesh has this name already
├── LifetimeError      (RuntimeError)            used after release, close or fork
├── MismatchError      (RuntimeError)            ranks describe one mesh or group differently
├── MissingRanksError  (TimeoutError)            members that did not come before the deadline
├── CircleError        (RuntimeError)            ranks that wait for each other
├── MethodError        (RuntimeError)            a parallel method that failed, or that is not there
├── SeamError          (RuntimeError)            a private name of torch that pgmesh needs is gone
└── LaunchError        (RuntimeError)            a launcher or a spawned rank failed
"""

from __future__ import annotations


class PgmeshError(Exception):
    """Everything that pgmesh raises on purpose."""


class ShapeError(PgmeshError, ValueError):
    """Sizes that do not fit the ranks."""


class AxisError(PgmeshError, ValueError, IndexError):
    """An axis the mesh does not have, or one named twice."""


class PlaceError(PgmeshError, ValueError, IndexError):
    """A rank, a coord or an index that is off the mesh."""


class OptionsError(PgmeshError, ValueError):
    """Options that no such group can be made with."""


class MembershipError(PgmeshError, RuntimeError):
    """This rank is no member of what it asks for."""


class WorldError(PgmeshError, RuntimeError):
    """torch.distributed is not there, or not as needed."""


class NameTakenError(PgmeshError, RuntimeError):
    """A living mesh has this name already."""


class LifetimeError(PgmeshError, RuntimeError):
    """Used after release, close or fork."""


class MismatchError(PgmeshError, RuntimeError):
    """Ranks describe one mesh or group differently."""


class MissingRanksError(PgmeshError, TimeoutError):
    """Members that did not come before the deadline."""


class CircleError(PgmeshError, RuntimeError):
    """Ranks that wait for each other."""


class MethodError(PgmeshError, RuntimeError):
    """A parallel method that failed, or that is not there."""


class SeamError(PgmeshError, RuntimeError):
    """A private name of torch that pgmesh needs is gone."""


class LaunchError(PgmeshError, RuntimeError):
    """A launcher or a spawned rank failed."""


for _error in (PgmeshError, *PgmeshError.__subclasses__()):
    _error.__module__ = "pgmesh"  # where a user finds it: a traceback says pgmesh.ShapeError
