"""Downloads: several mirrors, resumed where they broke off, proven by digest before they take their name."""

import gzip
import hashlib
import http.client
import os
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from spark_node.data import catalogue, formats, lookup
from spark_node.data.catalogue import Download, Entry, File
from spark_node.errors import DataError

Report = Callable[[str, int, int | None], None]
"""Called with a download's name, the bytes that are here, and the bytes it has in all, where known."""

_TIMEOUT_SECONDS = 30.0
_ATTEMPTS = 4
_CHUNK = 1 << 16
_SLACK = 1 << 20


@dataclass(frozen=True)
class Fetched:
    """One official file that is now in place."""

    file: str
    path: Path
    status: Literal["fetched", "already there"]


class FetchFailed(DataError):
    """No mirror delivered, or what it delivered could not be written."""


class _Unavailable(Exception):
    """This mirror does not have the file: go on to the next one."""


class _BrokenOff(Exception):
    """The connection ended early: what came is kept, and can be resumed."""


def fetch(
    name: str, folder: Path | None = None, *, mirror: str | None = None, report: Report | None = None
) -> list[Fetched]:
    """Get the dataset into FOLDER/NAME or the user's cache; files that are there and good are left alone."""
    entry = catalogue.entry(name)
    if entry.embedded:
        return []
    if not entry.downloads:
        raise DataError(f"{name} has no ready-made download: {entry.advice}")
    if mirror is not None and urllib.parse.urlsplit(mirror).scheme not in ("http", "https"):
        raise DataError(f"mirror {mirror!r} is not an address; it starts with https:// or http://")
    if folder is None and (there := _already(entry)):
        return there
    return fetch_entry(entry, lookup.target_folder(entry, folder), mirror=mirror, report=report)


def fetch_entry(
    entry: Entry, target: Path, *, mirror: str | None = None, report: Report | None = None
) -> list[Fetched]:
    """Get every file of the entry into the folder `target`."""
    with _writing(target):
        target.mkdir(parents=True, exist_ok=True)
    present = lookup.files_in(entry, target).files
    done: list[Fetched] = []
    for download in entry.downloads:
        if all(_is_good(present.get(file.name), file) for file in download.files):
            done += [Fetched(file.name, present[file.name], "already there") for file in download.files]
        else:
            done += _obtain(download, target, mirror, report or _silent)
    return done


def _already(entry: Entry) -> list[Fetched]:
    """The dataset's files where a run would find them, if they are all good."""
    place = next((place for place in lookup.locate(entry.name) if place.found), None)
    if place is None or not all(_is_good(place.files[file.name], file) for file in entry.files):
        return []
    return [Fetched(file.name, place.files[file.name], "already there") for file in entry.files]


def _silent(_name: str, _done: int, _total: int | None) -> None:
    """Report nothing."""


def _is_good(path: Path | None, file: File) -> bool:
    try:
        return path is not None and bool(formats.read_official(path, file))
    except DataError:
        return False


def _obtain(download: Download, target: Path, mirror: str | None, report: Report) -> list[Fetched]:
    """The download from the first mirror that has it."""
    reasons = []
    for base in download.mirrors if mirror is None else (mirror,):
        url = f"{base.rstrip('/')}/{download.name}"
        try:
            return _from_mirror(download, url, target, report)
        except _Unavailable as error:
            reasons.append(f"{url}: {error}")
    raise FetchFailed(
        f"{download.name}: no mirror delivered it ({'; '.join(reasons)}); check the network, name another "
        f"with --mirror URL, or put the file into {target} by hand"
    )


def _from_mirror(download: Download, url: str, target: Path, report: Report) -> list[Fetched]:
    """Transfer, resuming as long as it breaks off; prove; put in place."""
    part = target / f".{download.name}.{hashlib.sha256(url.encode()).hexdigest()[:8]}.part"
    problem = "it keeps breaking off"
    for _ in range(_ATTEMPTS):
        resumed = part.exists()
        try:
            _transfer(download, url, part, report)
            return _install(download, part, target)
        except _BrokenOff as error:
            problem = str(error)
        except FetchFailed:
            raise
        except DataError as error:
            part.unlink(missing_ok=True)
            problem = str(error)
            if not resumed:
                break
    raise _Unavailable(problem)


def _transfer(download: Download, url: str, part: Path, report: Report) -> None:
    """Append to `part` what it still lacks, or start afresh where the server cannot resume."""
    limit = sum(file.size for file in download.files) + _SLACK
    have = part.stat().st_size if part.exists() else 0
    try:
        response = _request(url, have)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not have:
            raise _Unavailable(f"HTTP {error.code} {error.reason}") from error
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return
        part.unlink()
        raise _BrokenOff("the server no longer has what was begun") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Unavailable(_reason(error)) from error
    with response:
        start = have if _resumes(response, have) else 0
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if length.isdecimal() and len(length) < 16 else None
        if (total or 0) > limit:
            raise _Unavailable(f"it offers {total} bytes where at most {limit} are expected")
        with _writing(part), part.open("ab" if start else "wb") as handle:
            _copy(response, handle, start, total, limit, lambda done: report(download.name, done, total))


def _request(url: str, have: int) -> http.client.HTTPResponse:
    headers = {"User-Agent": "spark-dfl", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    return response


def _resumes(response: http.client.HTTPResponse, have: int) -> bool:
    """Whether the answer goes on where we stopped; an answer that does not is the whole file."""
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        return False
    if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
        raise _Unavailable("it answers with another range than the one asked for")
    return True


def _copy(
    response: http.client.HTTPResponse,
    handle: BinaryIO,
    done: int,
    total: int | None,
    limit: int,
    report: Callable[[int], None],
) -> None:
    report(done)
    while chunk := _receive(response, done):
        done += len(chunk)
        if done > limit:
            raise DataError(f"it sends more than the {limit} bytes expected")
        handle.write(chunk)
        report(done)
    if total is not None and done < total:
        raise _BrokenOff(f"the connection ended after {done} of {total} bytes")


def _receive(response: http.client.HTTPResponse, done: int) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenOff(f"the connection broke after {done} bytes ({_reason(error)})") from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """An error of the file system within is one of this folder, not of the mirror."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise FetchFailed(f"{path}: cannot be written ({reason}); try --folder DIR") from error


def _install(download: Download, part: Path, target: Path) -> list[Fetched]:
    """Prove what came by its digests, then give it its name. Nothing unproven ever has that name."""
    if download.inside is None:
        formats.read_official(part, download.files[0])
        with _writing(target / download.name):
            os.replace(part, target / download.name)
        placed = [Fetched(download.files[0].name, target / download.name, "fetched")]
    else:
        placed = _unpack(download, part, target)
    for leftover in target.glob(f".{download.name}.*.part"):
        leftover.unlink(missing_ok=True)
    return placed


class _Bounded(gzip.GzipFile):
    """A gzip stream that refuses to give more than `budget` bytes: an archive cannot swell without end."""

    def __init__(self, path: Path, budget: int) -> None:
        super().__init__(path, "rb")
        self._left = budget

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._left -= len(data)
        if self._left < 0:
            raise DataError("the archive unpacks to more bytes than expected")
        return data


def _unpack(download: Download, part: Path, target: Path) -> list[Fetched]:
    """Take the expected members, of the expected sizes and digests, and nothing else, out of the tar."""
    wanted = {f"{download.inside}/{file.name}": file for file in download.files}
    budget = sum(file.size for file in download.files) + _SLACK
    placed = []
    try:
        with _Bounded(part, budget) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                file = wanted.get(member.name)
                if file is not None and member.isreg() and member.size == file.size:
                    content = tar.extractfile(member)
                    placed.append(_place(file, content.read() if content else b"", target))
                    del wanted[member.name]
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"the archive is damaged ({error})") from error
    if wanted:
        raise DataError(f"the archive lacks {', '.join(wanted)}")
    part.unlink(missing_ok=True)
    return placed


def _place(file: File, data: bytes, target: Path) -> Fetched:
    """Write a member under a passing name, prove it, and rename it."""
    passing = target / f".{file.name}.part"
    try:
        with _writing(passing):
            passing.write_bytes(data)
        formats.read_official(passing, file)
        with _writing(target / file.name):
            os.replace(passing, target / file.name)
    finally:
        passing.unlink(missing_ok=True)
    return Fetched(file.name, target / file.name, "fetched")


def _reason(error: BaseException) -> str:
    """What went wrong, in words: urllib wraps the cause."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(getattr(cause, "strerror", None) or cause) or type(error).__name__
