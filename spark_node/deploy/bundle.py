"""What goes into a container's volume before it starts, and what comes out of it: as tar, with owners and modes."""

import io
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from spark_node.deploy.hosts import HostsError
from spark_node.deploy.plan import (
    CERTS,
    CHECKPOINTS,
    CONFIG,
    HOME,
    LOGS,
    ORCHESTRATOR,
    PARTITION,
    PEERS,
    RUN,
    Container,
    Plan,
    settings_file,
)
from spark_node.security.authority import Authority
from spark_node.security.identity import Role

USER = 10_001
"""User and group of every container: the image's own."""
MOST_BYTES, MOST_FILES = 4 * 2**30, 1_000_000
"""Bounds of what is taken out of a container."""


def make_certificates(plan: Plan, folder: Path) -> dict[str, Path]:
    """An authority, and for each container a folder with its own identities only: {container: folder}.

    The authority's key stays in `folder`, or where the hosts file says; no container ever has it.
    """
    days, place = plan.config.security.days, plan.deployment.authority
    if place is not None and (place / "authority.pem").exists():
        authority = Authority.open(place)
    else:
        authority = Authority.create(place or folder / "authority", f"run-{plan.run_id}", days)
    found = {}
    for container in plan.containers:
        own = found[container.name] = folder / container.name
        if container.role == PEERS:
            for peer in container.peers:
                authority.issue(Role.PEER, peer, days, own)
        else:
            role = Role.ORCHESTRATOR if container.role == ORCHESTRATOR else Role.OBSERVER
            authority.issue(role, role.value, days, own)
    return found


def pack(plan: Plan, container: Container, certificates: Path) -> bytes:
    """Everything that a container reads, for its volume: owned by its user, keys for nobody else."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        _add_file(archive, CONFIG, settings_file(plan).encode(), 0o600)
        if plan.partition is not None:
            try:
                _add_file(archive, PARTITION, plan.partition.read_bytes(), 0o600)
            except OSError as error:
                raise HostsError(f"{plan.partition}: cannot be read ({error.strerror})") from None
        for folder in (CERTS, LOGS, CHECKPOINTS, str(PurePosixPath(RUN).parent)):
            _add_folder(archive, folder)
        for path in sorted(certificates.rglob("*")):
            target = f"{CERTS}/{path.relative_to(certificates).as_posix()}"
            if path.is_dir():
                _add_folder(archive, target)
            else:
                _add_file(archive, target, path.read_bytes(), 0o600)
    return packed.getvalue()


def _add_file(archive: tarfile.TarFile, target: str, data: bytes, mode: int) -> None:
    entry = _entry(target, mode)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def _add_folder(archive: tarfile.TarFile, target: str) -> None:
    entry = _entry(target, 0o700)
    entry.type = tarfile.DIRTYPE
    archive.addfile(entry)


def _entry(target: str, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(str(PurePosixPath(target).relative_to(HOME)))
    entry.mode, entry.uid, entry.gid = mode, USER, USER
    return entry


def unpack(chunks: Iterable[bytes], target: Path) -> int:
    """Files and folders of an archive whose one top folder becomes `target`; how many files there are.

    What came out of a container is not trusted: no links, no devices, nothing outside of `target`, within bounds.
    """
    count = 0
    with tarfile.open(fileobj=_Stream(chunks), mode="r|") as archive:
        for entry in archive:
            parts = PurePosixPath(entry.name).parts
            inner = Path(*parts[1:]) if len(parts) > 1 else Path()
            if PurePosixPath(entry.name).is_absolute() or ".." in parts:
                raise ValueError(f"an entry {entry.name[:80]!r} that points outside")
            if entry.isdir():
                (target / inner).mkdir(parents=True, exist_ok=True)
            elif entry.isfile():
                count += 1
                if count > MOST_FILES:
                    raise ValueError(f"more than {MOST_FILES} files")
                source = archive.extractfile(entry)
                assert source is not None
                (target / inner).parent.mkdir(parents=True, exist_ok=True)
                with (target / inner).open("wb") as file:
                    shutil.copyfileobj(source, file, 2**20)
    return count


def replace_folder(new: Path, target: Path) -> None:
    """Put a folder in the place of another; there is always a whole one."""
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


class _Stream(io.RawIOBase):
    """Chunks as a file that can only be read on, up to a bound."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks: Iterator[bytes] = iter(chunks)
        self._rest, self._left = b"", MOST_BYTES

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while len(self._rest) < size or size < 0:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            self._left -= len(chunk)
            if self._left < 0:
                raise ValueError(f"more than {MOST_BYTES} bytes")
            self._rest += chunk
        size = len(self._rest) if size < 0 else size
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken
