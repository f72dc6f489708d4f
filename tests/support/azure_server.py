"""Azurite, Microsoft's own stand-in for Azure Blob Storage, behind a proxy that can break.

Azurite is a program for Node, installed by npm from `azurite/package-lock.json`. Without npm the tests are skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from azure.storage.blob import ContainerClient

from local_stack.owned_process import free_port
from tests.support.faulty_proxy import FaultyProxy, server_behind

BUCKET = "cairn-tests"
VARIABLE = "AZURE_STORAGE_CONNECTION_STRING"
# Azurite's only account and its key, which Microsoft's documentation prints.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def connection_string(url: str) -> str:
    return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={url}/{ACCOUNT};"


def _azurite() -> Path:
    """Return the program, which the first call for a lock file installs. Other processes wait meanwhile."""
    if shutil.which("npm") is None:
        pytest.skip("npm is missing, which installs Azurite: apt-get install nodejs npm")
    files = [Path(__file__).with_name("azurite") / name for name in ("package.json", "package-lock.json")]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    folder = Path(sys.prefix) / "azurite" / digest
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            for file in files:
                shutil.copy(file, folder)
            command = [
                "npm",
                "ci",
                "--prefix",
                str(folder),
                "--ignore-scripts",
                "--no-audit",
                "--no-fund",
                "--loglevel=error",
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                pytest.skip(f"npm could not install Azurite: {done.stderr.strip()[-200:]}")
            (folder / "installed").touch()
    return folder / "node_modules/.bin/azurite-blob"


@contextmanager
def azure_server() -> Iterator[FaultyProxy]:
    """Run a server with the container `BUCKET`. Within the block, the variable `VARIABLE` names the server."""
    port, program = free_port(), _azurite()
    proxy, own = FaultyProxy(f"http://127.0.0.1:{port}"), connection_string(f"http://127.0.0.1:{port}")
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent"]
    command += ["--skipApiVersionCheck", "--disableTelemetry"]

    def ready() -> None:
        ContainerClient.from_connection_string(own, BUCKET, retry_total=0).create_container()

    variables = {VARIABLE: connection_string(proxy.url)}
    with (
        tempfile.TemporaryDirectory(prefix="cairn-azurite-") as folder,
        server_behind(proxy, command, ready, variables, cwd=folder),
    ):
        yield proxy
