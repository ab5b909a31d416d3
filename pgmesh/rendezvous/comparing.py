"""Publish or compare: fingerprints of meshes and groups in the store. The first one that was published holds."""

from __future__ import annotations

from pgmesh.errors import MismatchError
from pgmesh.rendezvous.operations import Append, CompareSet, Operation, Read, Run
from pgmesh.rendezvous.records import Decision, Fingerprint, decode_fingerprint


def register_mesh(key: str, fingerprint: Fingerprint) -> tuple[Operation, Operation]:
    """The operations that publish the fingerprint of a mesh. Each rank performs them once for each mesh."""
    encoded = fingerprint.encoded.decode()
    return Append(f"{key}/fingerprints", f"{encoded}\n"), CompareSet(key, encoded)


def check_mesh(run: Run, key: str, fingerprint: Fingerprint, first: bytes) -> None:
    """Compare the fingerprint of a mesh with the first one that was published.

    Args:
        run: performs operations on the store.
        first: the answer to the last operation of ``register_mesh``.

    Raises:
        MismatchError: they differ. It is also published under ``<key>/mismatch`` for the ranks that wait.
    """
    if fingerprint.mismatch([first]) is not None:
        (seen,) = run(Read(f"{key}/fingerprints"))
        where = key if decode_fingerprint(first) is None else f"{key}/fingerprints"
        mismatch = fingerprint.mismatch([first, *(seen or b"").splitlines()], where)
        _raise_mismatch(run, f"{key}/mismatch", mismatch or "")


def check_published(run: Run, mismatch_key: str, fingerprint: Fingerprint, seen: bytes, where: str) -> None:
    """Compare a fingerprint with an encoded one.

    Args:
        run: performs operations on the store.
        mismatch_key: store key for the mismatch.
        where: store key that ``seen`` was read from.

    Raises:
        MismatchError: they differ. It is also published for the ranks that wait.
    """
    if mismatch := fingerprint.mismatch([seen], where):
        _raise_mismatch(run, mismatch_key, mismatch)


def _raise_mismatch(run: Run, key: str, mismatch: str) -> None:
    """Publish a mismatch for the ranks that wait, and raise the one that was published first."""
    (text,) = run(CompareSet(key, Decision("mismatch", mismatch).pack()))
    raise MismatchError(Decision.unpack(key, text).text)
