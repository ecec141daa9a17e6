"""The live page over HTTP: one self-contained page, the state as JSON, and news of it as server-sent events."""

import asyncio
import base64
import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from functools import cache
from importlib import resources
from typing import Any

from spark_node.config import is_loopback
from spark_node.errors import UserError
from spark_node.observe.live import Live
from spark_node.web import Page, serve

PORT = 7420
_PAUSE, _BEAT = 0.5, 5.0
"""Seconds between two pieces of news at least, and at most: a page that hears nothing for longer says so."""
_SAFE = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def bind(host: str, port: int | None) -> socket.socket:
    """A listening socket; without a port the usual one, or where that is taken, a free one. UserError where none."""
    try:
        return _bind(host, PORT if port is None else port)
    except OSError as error:
        if port is None:
            return bind(host, 0)
        why = error.strerror or str(error)
        raise UserError(f"--dashboard {port} on {host}: {why}; give another port (0 = a free one)") from None


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener


def address(listener: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def warning(host: str) -> str:
    """What whoever opens the page to others should know; empty on the loopback."""
    if is_loopback(host):
        return ""
    return (
        f"warning: the live page on {host} asks nobody who they are and is not encrypted: everyone who can connect "
        "sees the names, accuracies and traffic of all peers (no data, no models); it can change nothing"
    )


async def start(listener: socket.socket, host: str, live: Live) -> asyncio.Server:
    """Serve the page of a run until closed."""
    pages: dict[str, Callable[[], Page]] = {
        "/": page,
        "/state": lambda: Page("application/json", _json(_whole(live)), _SAFE),
        "/events": lambda: Page("text/event-stream", _events(live), _SAFE),
    }
    return await serve(listener, pages, names=frozenset({host.lower(), socket.gethostname().lower()}))


@cache
def page() -> Page:
    """The page, with a policy that allows its own script and style and nothing else, from nowhere else."""
    text = resources.files("spark_node.observe").joinpath("live_page.html").read_text(encoding="utf-8")
    script, style = _digest(text, "script"), _digest(text, "style")
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page("text/html; charset=utf-8", text.encode(), {**_SAFE, "Content-Security-Policy": policy})


def _digest(text: str, tag: str) -> str:
    (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


def _whole(live: Live) -> dict[str, Any]:
    return {**live.head(), **live.state(), "rounds": live.rounds}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


async def _events(live: Live) -> AsyncIterator[bytes]:
    """Everything at first, then what has changed, as it changes."""
    seen, sent = live.version, len(live.rounds)
    yield b"retry: 1000\n\nevent: whole\ndata: " + _json(_whole(live)) + b"\n\n"
    while True:
        try:
            async with asyncio.timeout(_BEAT):
                await live.changed(seen)
        except TimeoutError:
            yield b"event: beat\ndata: {}\n\n"
            continue
        seen, fresh = live.version, live.rounds[sent:]
        sent += len(fresh)
        yield b"event: news\ndata: " + _json({**live.state(), "fresh": fresh}) + b"\n\n"
        await asyncio.sleep(_PAUSE)
