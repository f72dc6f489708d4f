"""A server process that speaks S3's protocol, behind a proxy that can break.

The server is moto. Where the variable CAIRN_WEED names the program of SeaweedFS, SeaweedFS serves. The proxy mends moto's two leniencies:
moto may let two conditional writes at the same time pass, and moto does not compare the checksums that requests give.
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import boto3
import google_crc32c

from local_stack.owned_process import free_port
from tests.support.faulty_proxy import Answer, FaultyProxy, Request, server_behind

BUCKET = "cairn-tests"
# The path of the program weed, or "".
SEAWEEDFS = os.environ.get("CAIRN_WEED", "")
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "CAIRN_S3_ADDRESSING": "path",
}


class S3Server(FaultyProxy):
    """The proxy.

    Attributes:
        server_url: The server itself. The proxy can't read the chunks that Arrow's S3 client sends.
        ignores_conditions: Drop these preconditions, such as "PUT if-match", as some compatible stores do.
        conflicts: Answer 409 to this many of the next conditional writes.
    """

    def __init__(self, upstream: str, *, lenient: bool) -> None:
        super().__init__(upstream)
        self.server_url = upstream
        self._lenient = lenient
        self._writes = threading.Lock() if lenient else nullcontext()
        self.ignores_conditions = set[str]()
        self.conflicts = 0

    def forward(self, request: Request) -> Answer:
        """See `FaultyProxy.forward`."""
        if request.method in ("GET", "HEAD"):
            return _without_checksum_of_parts(super().forward(request)) if self._lenient else super().forward(request)
        given = request.headers.get("x-amz-checksum-crc32c")
        if self._lenient and given is not None and request.method == "PUT":
            found = base64.b64encode(google_crc32c.value(request.body).to_bytes(4, "big")).decode()
            if found != given:
                return _refused(400, "BadDigest")
        conditions = {name for name in ("if-match", "if-none-match") if name in request.headers}
        ignored = {name for name in conditions if f"{request.method} {name}" in self.ignores_conditions}
        request = replace(request, headers={k: v for k, v in request.headers.items() if k not in ignored})
        with self._writes:
            if conditions and self.conflicts:
                self.conflicts -= 1
                return _refused(409, "ConditionalRequestConflict")
            return super().forward(request)


def _without_checksum_of_parts(answer: Answer) -> Answer:
    """Leave out the checksum of a multipart upload: moto calls it FULL_OBJECT, but computes it from the parts' checksums."""
    if "-" not in answer.headers.get("ETag", ""):
        return answer
    return replace(
        answer, headers={k: v for k, v in answer.headers.items() if not k.lower().startswith("x-amz-checksum")}
    )


def _refused(status: int, code: str) -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>refused by the strict proxy</Message></Error>"
    return Answer(status=status, headers={"Content-Type": "application/xml"}, body=body.encode())


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server with the bucket `BUCKET`. Within the block, the AWS SDK's environment variables name the server."""
    port = free_port()
    proxy = S3Server(f"http://127.0.0.1:{port}", lenient=not SEAWEEDFS)
    variables = {**ENVIRONMENT, "AWS_ENDPOINT_URL_S3": proxy.url}
    own = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "1"}  # Tests upload parts of less than 5 MiB.

    def ready() -> None:
        boto3.client("s3", endpoint_url=proxy.server_url).create_bucket(Bucket=BUCKET)

    with tempfile.TemporaryDirectory(prefix="cairn-weed-") as data:
        command = _seaweedfs(port, data) if SEAWEEDFS else _moto(port)
        with server_behind(proxy, command, ready, variables, env=own):
            yield proxy


def _moto(port: int) -> list[str]:
    return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]


def _seaweedfs(port: int, data: str) -> list[str]:
    """Master, volumes, filer and S3 in one process. SeaweedFS takes its identity from the AWS SDK's variables."""
    ports = {"master.port": free_port(), "volume.port": free_port(), "filer.port": free_port(), "s3.port": port}
    ports |= {f"{name}.grpc": free_port() for name in list(ports)} | {"s3.port.iceberg": 0, "s3.port.lance": 0}
    given = [f"-{name}={number}" for name, number in ports.items()]
    return [SEAWEEDFS, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-volume.max=100",
            "-master.volumeSizeLimitMB=64", "-master.telemetry=false", *given]  # fmt: skip
