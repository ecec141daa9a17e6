"""The small HTTP server: what it answers, and what it does not."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from spark_node.config import is_loopback
from spark_node.web import Page, is_ours, serve


async def ask(server: asyncio.Server, request: bytes) -> bytes:
    host, port = server.sockets[0].getsockname()[:2]
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


async def three() -> AsyncIterator[bytes]:
    for piece in (b"one ", b"two ", b"three"):
        yield piece


PAGES = {"/": lambda: Page("text/plain", b"hello", {"X-Own": "yes"}), "/stream": lambda: Page("text/plain", three())}


def test_pages_and_streams_are_answered_and_nothing_else_is() -> None:
    async def talk() -> None:
        server = await serve(("127.0.0.1", 0), PAGES)
        whole = await ask(server, b"GET /?a=b HTTP/1.1\r\nHost: x\r\n\r\n")
        assert whole.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"X-Own: yes" in whole
        assert whole.endswith(b"\r\n\r\nhello")
        assert (await ask(server, b"HEAD / HTTP/1.1\r\n\r\n")).endswith(b"Content-Length: 5\r\n\r\n")
        assert (await ask(server, b"GET /stream HTTP/1.1\r\n\r\n")).endswith(b"one two three")
        assert b" 405 " in await ask(server, b"POST / HTTP/1.1\r\n\r\n")
        assert b" 404 " in await ask(server, b"GET /../x HTTP/1.1\r\n\r\n")
        assert await ask(server, b"GET / HTTP/1.1\r\nX: " + 10_000 * b"a" + b"\r\n\r\n") == b"", "too long a head"
        assert await ask(server, b"GET / HTTP/1.1\r\n") == b"", "half a head"
        server.close()

    asyncio.run(talk())


def test_with_names_only_requests_that_mean_this_server_are_answered() -> None:
    async def talk() -> None:
        server = await serve(("127.0.0.1", 0), PAGES, names=frozenset({"box"}))
        for host, status in ((b"box:1", b"200"), (b"localhost", b"200"), (b"evil.example:80", b"421")):
            assert status in (await ask(server, b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"))[:16]
        assert b"421" in (await ask(server, b"GET / HTTP/1.1\r\n\r\n"))[:16], "none is named"
        assert b"421" in (await ask(server, b"GET / HTTP/1.1\r\nHost: box\r\nHost: evil.example\r\n\r\n"))[:16]
        server.close()

    asyncio.run(talk())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "[::1]:80", "[::1]", "10.1.2.3:7", "LOCALHOST:1"])
def test_an_address_is_nobody_elses_name(host: str) -> None:
    assert is_ours(host)


@pytest.mark.parametrize("host", ["", "evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "[::1"])
def test_any_other_name_is(host: str) -> None:
    assert not is_ours(host)


def test_the_loopback_is_known_in_every_form() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "box", ""))
