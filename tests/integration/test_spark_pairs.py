"""A client of Spark Connect meets a server of another version. Each needs an installed PySpark: `tests/support/overlays.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from cairn.spark.server_command import answers
from local_stack.owned_process import OwnedProcesses, claim_port
from state_backend.adapters.open_storage import open_storage
from state_backend.checkpoint.log import read_log
from tests.support.overlays import REPOSITORY, environment
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.long("a minute, and an installed PySpark of another version")]

OLD = "4.1.4"


def variables(version: str | None) -> dict[str, str]:
    return environment(f"pyspark-{version}") if version else dict(os.environ)


@pytest.mark.parametrize(("client", "server"), [(OLD, None), (None, OLD)], ids=["newer server", "older server"])
def test_newer_servers_are_accepted_and_older_refused(client: str | None, server: str | None, tmp_path: Path) -> None:
    """A tried pair computes; another pair is refused when the session opens, and the error names both versions."""
    processes, port, root = OwnedProcesses(tmp_path / "logs"), claim_port(0), str(tmp_path / "root")
    command = [sys.executable, "-m", "cairn.command.cli", "spark", "local[1]", "--port", str(port)]
    try:
        processes.start("server", command, env=variables(server), cwd=REPOSITORY)
        wait_until(lambda: answers(port), 240, "the server answers")
        asks = [sys.executable, "-m", "tests.support.client_of_server", f"sc://127.0.0.1:{port}", root]
        done = subprocess.run(
            asks, env=variables(client), cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=600
        )
    finally:
        processes.stop(grace_s=10)
    if client is None:
        refused = (
            f"UsageError: the Spark Connect server runs Spark {OLD}, and this driver PySpark {pyspark.__version__}"
        )
        assert done.returncode == 1 and refused in done.stderr and not Path(root).exists(), done.stderr[-2000:]
    else:
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        assert len(read_log(open_storage(f"{root}/counting")).completed()) == 2
