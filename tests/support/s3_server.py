"""A real server process that speaks S3's protocol (moto), behind a proxy that can break."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import boto3

from local_stack.owned_process import free_port
from tests.support.faulty_proxy import FaultyProxy

BUCKET = "cairn-tests"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "CAIRN_S3_ADDRESSING": "path",
}


@contextmanager
def s3_server() -> Iterator[FaultyProxy]:
    """Run a server with the bucket `BUCKET`. Within the block, the AWS SDK's environment variables name the server."""
    port = free_port()
    before = {name: os.environ.get(name) for name in (*ENVIRONMENT, "AWS_ENDPOINT_URL_S3")}
    proxy = FaultyProxy(f"http://127.0.0.1:{port}")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
        )
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
            process.wait(10)


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
