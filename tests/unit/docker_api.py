"""An endpoint that speaks enough of the Docker API for the real SDK, and remembers every request it gets."""

import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

_IMAGE = {"Id": "sha256:1", "RepoTags": ["spark-dfl:latest"], "Config": {}}


@dataclass(frozen=True)
class Request:
    """A call as it came."""

    method: str
    path: str
    query: dict[str, list[str]]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class RecordingEngine:
    """Containers are created and never started; `images` are those that it has, `stuck` paths never answer."""

    images: tuple[str, ...] = ("spark-dfl:latest",)
    stuck: tuple[str, ...] = ()
    requests: list[Request] = field(default_factory=list)
    containers: dict[str, dict[str, Any]] = field(default_factory=dict)
    volumes: dict[str, dict[str, Any]] = field(default_factory=dict)
    fails: dict[str, str] = field(default_factory=dict)
    """{"POST /containers/create": message}: calls that it refuses."""

    def __enter__(self) -> "RecordingEngine":
        engine, self.released = self, threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                url = urlsplit(self.path)
                path = re.sub(r"^/v[0-9.]+", "", url.path)
                request = Request(self.command, path, parse_qs(url.query), self._body(size))
                engine.requests.append(request)
                if path in engine.stuck:
                    engine.released.wait(60)
                status, reply = engine.reply(request)
                data = b"OK" if path == "/_ping" else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data) if status != 204 else 0))
                self.send_header("Api-Version", "1.41")
                self.end_headers()
                if status != 204:
                    self.wfile.write(data)

            def _body(self, size: int) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(size)
                found = b""
                while length := int(self.rfile.readline(), 16):
                    found += self.rfile.read(length)
                    self.rfile.readline()
                self.rfile.readline()
                return found

            def log_message(self, format: str, *args: Any) -> None:
                pass

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._server.server_address[1]}"

    def reply(self, request: Request) -> tuple[int, Any]:
        call, (kind, *rest) = f"{request.method} {request.path}", request.path.strip("/").split("/")
        if call in self.fails:
            return 400, {"message": self.fails[call]}
        if kind in ("_ping", "version"):
            return 200, {"ApiVersion": "1.41", "Version": "20.10"}
        if kind == "images":
            name = "/".join(rest[:-1])
            if request.method == "POST":
                return 404, {"message": "pull access denied"}
            return (200, _IMAGE) if name in self.images else (404, {"message": f"no such image: {name}"})
        if kind == "volumes":
            return self._volume(request, rest)
        return self._container(request, rest)

    def _volume(self, request: Request, rest: list[str]) -> tuple[int, Any]:
        if request.method == "POST":
            made = {"Driver": "local", **request.json}
            self.volumes[made["Name"]] = made
            return 201, made
        if request.method == "DELETE":
            return (204, None) if self.volumes.pop(rest[0], None) else (404, {"message": "no such volume"})
        if rest:
            return 200, self.volumes[rest[0]]
        return 200, {"Volumes": list(self.volumes.values()), "Warnings": None}

    def _container(self, request: Request, rest: list[str]) -> tuple[int, Any]:
        if rest == ["create"]:
            name = request.query["name"][0]
            self.containers[name] = {
                "Id": name,
                "Name": f"/{name}",
                "Config": request.json,
                "State": {"Status": "created"},
            }
            return 201, {"Id": name, "Warnings": []}
        if rest == ["json"]:
            listed = [{"Id": name, "Names": [f"/{name}"], "Labels": {}} for name in self.containers]
            return 200, [] if "name" in request.query.get("filters", [""])[0] else listed
        if request.method == "DELETE":
            return (204, None) if self.containers.pop(rest[0], None) else (404, {"message": "no such container"})
        if rest[1:] == ["json"]:
            return 200, self.containers[rest[0]]
        return (204, None) if rest[1:] == ["start"] else (200, {})
