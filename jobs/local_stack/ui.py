"""Program that runs Airflow with its UI until Ctrl-C; `make ui` starts it.

The environment variable PORT is the UI's port, 8080 by default.

The program replaces `airflow standalone`, and differs from it in three points. Airflow's database is a PostgreSQL
server in this folder. If a component such as the scheduler dies, the program reports this and stops the other
components. SIGTERM stops all processes, as Ctrl-C does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from cairn.command.airflow_rest import ADMIN
from local_stack.airflow_server import AirflowServer
from state_backend.values.environment import Variable

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run Airflow, and return the exit code: 130 after Ctrl-C, and 1 if a component could not start or has ended."""
    text = os.environ.get("PORT") or "8080"
    if not text.isdigit() or not 0 < int(text) < 65536:
        print(f"PORT={text} is not a port number; write it as in: make ui PORT=8081", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    data = Path(Variable.DATA.given or ROOT / "data")
    try:
        airflow = AirflowServer(ROOT, home=ROOT, port=int(text), log_dir=ROOT / "logs" / "components")
        if airflow.port != int(text):
            print(f"another program uses port {text}; choose another port: make ui PORT=8081", file=sys.stderr)
            return 1
        print(
            f"starting Airflow; its components' logs are in {airflow.processes.log_dir.relative_to(ROOT)}", flush=True
        )
        with airflow:
            print(
                f"Airflow: {airflow.client.url}   (database: {airflow.database}; state: {data}/state; Ctrl-C stops it)"
            )
            print(
                f"Log in as {ADMIN} with the password {airflow.password}   (in {airflow.passwords.name}, which only you can read)"
            )
            print(
                "To use Airflow's commands, in another terminal of this folder: "
                "AIRFLOW_HOME=$PWD PATH=$PWD/.venv/bin:$PATH airflow dags list",
                flush=True,
            )
            if airflow.port != 8080:
                print(f"To let the command cairn find it: export {Variable.AIRFLOW}={airflow.client.url}", flush=True)
            while True:
                airflow.processes.check_alive()
                time.sleep(1)
    except KeyboardInterrupt:
        print("Airflow is stopped")
        return 130
    except (RuntimeError, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
