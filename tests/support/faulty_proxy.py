"""An HTTP proxy that breaks what a test tells it to break: status codes, connections, bodies, answers."""

from __future__ import annotations

import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

from state_backend.values.environment import environment

FaultKind = Literal[
    "401",  # these instead of forwarding
    "403",
    "429",
    "500",
    "503",
    "reset",  # the connection is reset before anything is forwarded
    "stalled",  # nothing is forwarded, and nothing comes back
    "truncated",  # forwarded; half of the answer's body comes back
    "trickled",  # forwarded; the body comes back byte by byte, too slowly
    "lost",  # forwarded; the connection is reset instead of an answer
    "lost 503",  # forwarded; 503 instead of the answer
    "stalled after",  # forwarded; nothing comes back
]
TRICKLE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    method: str
    target: str
    headers: dict[str, str]  # names in lower case
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(slots=True)
class Planned:
    """``struck`` requests were broken so far."""

    kind: FaultKind
    only: Callable[[Request], bool]
    skip: int
    times: int
    struck: int = 0


class FaultyProxy:
    """Forwards what comes to ``url`` to the host of ``upstream``, and notes it in ``requests``."""

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream).netloc
        self._planned: list[Planned] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.requests: list[Request] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_any(self) -> None:
                proxy._serve(self)

            do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = handle_any

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: object) -> None:  # a client that gave up
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def broken(
        self, kind: FaultKind, *, times: int = 1, skip: int = 0, only: Callable[[Request], bool] = lambda _: True
    ) -> Iterator[Planned]:
        """Within the block, lets ``skip`` fitting requests pass and breaks the following ``times``."""
        planned = Planned(kind, only, skip, times)
        self._planned.append(planned)
        try:
            yield planned
        finally:
            self._planned.remove(planned)

    def forward(self, request: Request) -> Answer:
        """What the server answers."""
        connection = HTTPConnection(self._upstream, timeout=30)
        try:
            connection.request(request.method, request.target, request.body, request.headers)
            response = connection.getresponse()
            body = response.read()
            return Answer(status=response.status, headers=dict(response.getheaders()), body=body)
        finally:
            connection.close()

    def _fault_of(self, request: Request) -> FaultKind | None:
        self.requests.append(request)
        for planned in tuple(self._planned):
            if not planned.only(request):  # unlocked: it may send requests itself
                continue
            with self._lock:
                if planned.skip > 0:
                    planned.skip -= 1
                elif planned.struck < planned.times:
                    planned.struck += 1
                    return planned.kind
        return None

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        body = handler.rfile.read(int(headers.get("content-length", 0)))
        request = Request(method=handler.command, target=handler.path, headers=headers, body=body)
        kind = self._fault_of(request)
        if kind is not None and kind.isdigit():
            return _send(handler, Answer(status=int(kind), body=b'{"error": {"code": %s}}' % kind.encode()))
        if kind == "reset":
            return _reset(handler)
        if kind == "stalled":
            return self._stall(handler)
        answer = self.forward(request)
        if kind == "lost":
            return _reset(handler)
        if kind == "lost 503":
            return _send(handler, Answer(status=503, body=b'{"error": {"code": 503}}'))
        if kind == "stalled after":
            return self._stall(handler)
        if kind == "truncated" and not answer.body:
            return _reset(handler)
        return _send(handler, answer, cut=kind == "truncated", slowly=kind == "trickled")

    def _stall(self, handler: BaseHTTPRequestHandler) -> None:
        self._closing.wait(20)
        handler.close_connection = True


def _send(handler: BaseHTTPRequestHandler, answer: Answer, *, cut: bool = False, slowly: bool = False) -> None:
    handler.send_response_only(answer.status)
    for name, value in answer.headers.items():
        if name.lower() not in ("content-length", "transfer-encoding", "connection"):
            handler.send_header(name, value)
    told = {name.lower(): value for name, value in answer.headers.items()}.get("content-length")
    size = str(len(answer.body)) if told is None or handler.command != "HEAD" else told
    handler.send_header("Content-Length", size)
    handler.end_headers()
    if slowly:
        for at in range(len(answer.body)):
            threading.Event().wait(TRICKLE_S)
            handler.wfile.write(answer.body[at : at + 1])
    elif cut:
        handler.wfile.write(answer.body[: len(answer.body) // 2])
        handler.close_connection = True
    elif handler.command != "HEAD":
        handler.wfile.write(answer.body)


def _reset(handler: BaseHTTPRequestHandler) -> None:
    """Closes such that the client sees a reset, not an end."""
    handler.close_connection = True
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


@contextmanager
def server_behind(
    proxy: FaultyProxy,
    command: Sequence[Any],
    ready: Callable[[], object],
    variables: Mapping[str, str],
    *,
    wait_s: float = 60,
    **how: Any,
) -> Iterator[None]:
    """Run a server until the end of the block, in which the variables are set. ``ready`` raises as long as the server does not answer."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, **how)
        try:
            with environment(variables):
                deadline = time.monotonic() + wait_s
                while True:
                    try:
                        ready()
                        break
                    except Exception:
                        if time.monotonic() > deadline or process.poll() is not None:
                            raise
                        time.sleep(0.1)
                yield
        finally:
            proxy.close()
            process.terminate()
            process.wait(60)
