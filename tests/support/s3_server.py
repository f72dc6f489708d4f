"""A real server process that speaks S3's protocol (moto), behind a proxy that can break, and that is as strict as the original where the
server is not: two conditional writes at the same time, and the checksums that requests give.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import boto3
import google_crc32c

from local_stack.owned_process import free_port
from tests.support.faulty_proxy import Answer, FaultyProxy, Request

BUCKET = "cairn-tests"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "CAIRN_S3_ADDRESSING": "path",
}


class S3Server(FaultyProxy):
    """The proxy. It sends one write at a time, since moto may let two conditional writes pass.

    Attributes:
        server_url: The server itself. The proxy can't read the chunks that Arrow's S3 client sends.
        ignores_conditions: Drop preconditions, as some compatible stores do.
        conflicts: Answer 409 to this many of the next conditional writes.
    """

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.server_url = upstream
        self._writes = threading.Lock()
        self.ignores_conditions = False
        self.conflicts = 0

    def forward(self, request: Request) -> Answer:
        """See `FaultyProxy.forward`."""
        if request.method in ("GET", "HEAD"):
            return _without_checksum_of_parts(super().forward(request))
        given = request.headers.get("x-amz-checksum-crc32c")
        if given is not None and request.method == "PUT":
            found = base64.b64encode(google_crc32c.value(request.body).to_bytes(4, "big")).decode()
            if found != given:
                return _refused(400, "BadDigest")
        conditions = {name for name in ("if-match", "if-none-match") if name in request.headers}
        if self.ignores_conditions:
            request = replace(request, headers={k: v for k, v in request.headers.items() if k not in conditions})
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
    before = {name: os.environ.get(name) for name in (*ENVIRONMENT, "AWS_ENDPOINT_URL_S3")}
    proxy = S3Server(f"http://127.0.0.1:{port}")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log,
            # Tests upload parts of less than 5 MiB.
            env={**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "1"},
        )  # fmt: skip
        try:
            os.environ.update(ENVIRONMENT)
            _make_bucket(f"http://127.0.0.1:{port}", process)
            os.environ["AWS_ENDPOINT_URL_S3"] = proxy.url
            yield proxy
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            proxy.close()
            process.terminate()
            process.wait(60)


def _make_bucket(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            boto3.client("s3", endpoint_url=url).create_bucket(Bucket=BUCKET)
            return
        except Exception:
            if time.monotonic() > deadline or process.poll() is not None:
                raise
            time.sleep(0.1)
