"""A small read-only HTTP server on asyncio: pages and streams of text by path, nothing else. No torch."""

import asyncio
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

_HEAD_BYTES, _SECONDS, _MOST = 8192, 5.0, 256


@dataclass(frozen=True)
class Page:
    """One answer: its type, and its body, whole or piece by piece until the reader leaves."""

    kind: str
    body: bytes | AsyncIterator[bytes]
    headers: Mapping[str, str] = field(default_factory=dict)


Pages = Mapping[str, Callable[[], Page]]


def is_ours(header: str, names: frozenset[str] = frozenset()) -> bool:
    """Whether a Host header names an address, the loopback or one of `names`.

    A page of another site can reach us only under that site's own name, made to point here: never under an address.
    """
    host = header.strip().lower()
    found = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::\d+)?", host)
    host = (found[1] or found[2]) if found else ""
    return host == "localhost" or host in names or _is_address(host)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


async def serve(
    where: tuple[str, int] | socket.socket, pages: Pages, *, names: frozenset[str] | None = None
) -> asyncio.Server:
    """Answer GET and HEAD until closed; OSError where the port is not to be had.

    `names`: with them only requests are answered that mean this server (`is_ours`).
    """
    open_now = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        try:
            async with asyncio.timeout(_SECONDS):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, page = _choose(head, pages, names) if open_now <= _MOST else _failed(HTTPStatus.SERVICE_UNAVAILABLE)
            await _write(writer, status, page, only_head=head.startswith("HEAD "))
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            open_now -= 1
            writer.close()

    if isinstance(where, socket.socket):
        return await asyncio.start_server(answer, sock=where, limit=_HEAD_BYTES)
    return await asyncio.start_server(answer, *where, limit=_HEAD_BYTES)


def _choose(head: str, pages: Pages, names: frozenset[str] | None) -> tuple[HTTPStatus, Page]:
    line, _, rest = head.partition("\r\n")
    method, gap, target = line.partition(" ")
    made = pages.get(target.partition(" ")[0].partition("?")[0])
    if not gap or method not in ("GET", "HEAD"):
        return _failed(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD", Allow="GET, HEAD")
    if names is not None and not is_ours(_header(rest, "host"), names):
        return _failed(HTTPStatus.MISDIRECTED_REQUEST, "this server is reached by its address or as localhost")
    if made is None:
        return _failed(HTTPStatus.NOT_FOUND, f"try one of: {', '.join(pages)}")
    return HTTPStatus.OK, made()


def _failed(status: HTTPStatus, text: str = "", **headers: str) -> tuple[HTTPStatus, Page]:
    return status, Page("text/plain; charset=utf-8", f"{text}\n".encode() if text else b"", headers)


def _header(lines: str, name: str) -> str:
    """The value of a header; empty where it is missing or given twice."""
    found = [line.partition(":")[2] for line in lines.split("\r\n") if line.partition(":")[0].strip().lower() == name]
    return found[0] if len(found) == 1 else ""


async def _write(writer: asyncio.StreamWriter, status: HTTPStatus, page: Page, *, only_head: bool) -> None:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Type: {page.kind}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in page.headers.items()]
    if isinstance(page.body, bytes):
        lines.append(f"Content-Length: {len(page.body)}")
    writer.write("\r\n".join((*lines, "", "")).encode())
    if only_head:
        await writer.drain()
        return
    if isinstance(page.body, bytes):
        writer.write(page.body)
        async with asyncio.timeout(_SECONDS):
            await writer.drain()
        return
    async for piece in page.body:
        writer.write(piece)
        async with asyncio.timeout(_SECONDS):  # a reader that is stuck is left
            await writer.drain()
