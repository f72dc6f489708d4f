"""The password of a local Airflow: who finds it, and who gets a token for it."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cairn.command.airflow_rest import AirflowRest, RestError
from cairn.spark.local_server_secret import kept_secret
from local_stack.airflow_server import AirflowServer
from tests.support.layout import REPOSITORY


def test_the_password_is_random_kept_and_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        first = AirflowServer(REPOSITORY, home=tmp_path / "a", log_dir=tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(first.passwords.stat().st_mode) == 0o600
    assert json.loads(first.passwords.read_text()) == {"admin": first.password} and len(first.password) >= 40
    first.passwords.chmod(0o644)  # as Airflow itself writes it
    assert AirflowServer(REPOSITORY, home=tmp_path / "a", log_dir=tmp_path).password == first.password
    assert stat.S_IMODE(first.passwords.stat().st_mode) == 0o600
    assert AirflowServer(REPOSITORY, home=tmp_path / "b", log_dir=tmp_path).password != first.password
    first.passwords.write_text('{"somebody": "p"}')
    with pytest.raises(RuntimeError, match="has no password for the user admin; delete the file"):
        AirflowServer(REPOSITORY, home=tmp_path / "a", log_dir=tmp_path)


@pytest.fixture
def port() -> Iterator[int]:
    """An Airflow that gives a token to who knows the password, and answers nobody else."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = self.path == "/auth/token" and asked == {"username": "admin", "password": "right"}
            self.answer(201 if known else 401, {"access_token": "jwt"})

        def do_GET(self) -> None:
            self.answer(200 if self.headers["Authorization"] == "Bearer jwt" else 403, {"well": True})

        def answer(self, status: int, body: object) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_command_of_the_same_user_finds_the_password(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CAIRN_AIRFLOW_TOKEN", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    url = f"http://127.0.0.1:{port}"
    for stranger in (AirflowRest(url), AirflowRest(url, password="wrong")):
        with pytest.raises(RestError) as refused:
            stranger.call("GET", "/api/v2/dags")
        assert refused.value.status in (401, 403)
    with kept_secret("airflow", port, "right"):
        assert AirflowRest(url).call("GET", "/api/v2/dags") == {"well": True}
        # The token of the environment counts before.
        monkeypatch.setenv("CAIRN_AIRFLOW_TOKEN", "another")
        with pytest.raises(RestError):
            AirflowRest(url).call("GET", "/api/v2/dags")
