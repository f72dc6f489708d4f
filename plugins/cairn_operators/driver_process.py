"""Run a Spark driver as a child process of the task.

The task writes the driver's output to its log line by line, and reads the driver's result from a file. The driver never
outlives the task.

A separate process keeps Python workers and a JVM out of Airflow's task process. If user code leaks memory or crashes,
only the driver is affected. And a DAG file that imports Cairn's operators does not import Spark.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cairn_operators.airflow_versions import AirflowException, conf
from cairn_operators.failures import exit_failure, failure, repair
from cairn_operators.warm_driver import WarmDriver, start_host_if_it_pays, start_warm

# Seconds that the driver gets to end after SIGTERM. Airflow kills the task itself 5 s after SIGTERM. So the task can
# kill the driver's process group before that.
_GRACE_S = 2.0
_POLL_S = 1.0
# Matches lines of Spark's JVM that are no errors: log4j lines below ERROR, and messages from before log4j starts.
_JVM = re.compile(
    r"\d\d/\d\d/\d\d [\d:]{8} (TRACE|DEBUG|INFO|WARN) |WARNING: |Using Spark's default log4j|Setting default log level"
    r"|To adjust logging level|Picked up |\[Stage |:: "
)


class DriverProcess:
    """A runner of one Spark driver at a time. `stop` may be called at any time, twice, and from a signal handler."""

    def __init__(self, module: str, task: Any = None) -> None:
        self._module = module
        self._task = task
        self._process: subprocess.Popen[bytes] | WarmDriver | None = None

    def run(
        self,
        arguments: Sequence[str],
        log_line: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        private: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run the driver until it ends, and return its result. `log_line`: Gets each line of the driver's output.

        `environment`: Variables to add. `private`: Secrets that go to the driver's stdin as JSON.
        """
        from state_backend.adapters.work_folders import work_folder
        from state_backend.values.hide_secrets import hide

        # If this task is killed, the folder stays. The next task on this host deletes it.
        with work_folder("driver") as folder:
            result = folder / "result.json"
            try:
                self._process = _start(self._module, [*arguments, "--result", str(result)], environment or {}, private)
                for line in _in_groups(_lines(self._process)):
                    # A line that begins with "@cairn" is JSON for `log_line`. Secrets are hidden in all other lines.
                    log_line(line if line.startswith("@cairn ") else hide(line))
                return_code = self._process.wait()
            finally:
                self.stop()
            return _read_result(result, return_code, self._task)

    def stop(self) -> None:
        """End the driver and all processes of its group: SIGTERM, and SIGKILL after at most 2 s."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        # SIGKILL is always sent: a JVM or a Python worker of the group may outlive the driver.
        _signal_group(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        if isinstance(process, WarmDriver):
            process.close()
        self._process = None


def repo_root() -> Path:
    """Return the working directory of drivers, which holds `jobs/` with the pipelines.

    It is the checkout that contains this file. If this file is installed without a checkout, it is `AIRFLOW_HOME`, or
    the folder for temporary files if `AIRFLOW_HOME` does not exist.
    """
    here = Path(__file__).resolve().parents[2]
    if (here / "jobs").is_dir():
        return here
    home = Path(os.environ.get("AIRFLOW_HOME") or "~/airflow").expanduser()
    return home if home.is_dir() else Path(tempfile.gettempdir())


def _start(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], private: Mapping[str, Any] | None
) -> subprocess.Popen[bytes] | WarmDriver:
    from state_backend.adapters.die_with_parent import die_with_parent
    from state_backend.values.environment import Variable

    root = repo_root()
    path = os.pathsep.join(filter(None, [str(root / "jobs"), str(root), os.environ.get("PYTHONPATH")]))
    # These variables are the same for all tasks of an Airflow worker, so one host process can fork the warm drivers of
    # all of them.
    common = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    ours = {**common, **environment, Variable.PYTHON_PATH: os.pathsep.join(_path_of_the_task())}
    settings = None if private is None else json.dumps(private).encode()
    if warm := conf.getboolean("cairn", "warm_drivers", fallback=True):
        driver = start_warm(module, arguments, cwd=root, environment=ours, private=settings)
        if driver is not None:
            return driver
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=root,
        env=ours,
        stdin=subprocess.DEVNULL if settings is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509  one system call, loaded before the fork
    )
    if process.stdin is not None and settings is not None:
        # A broken pipe means that the driver has already ended. Its output says why.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(settings)
    if warm:
        start_host_if_it_pays(cwd=root, environment=common)
    return process


def _path_of_the_task() -> list[str]:
    """Return the folders of `sys.path` that belong neither to Python nor to installed packages.

    Airflow added these folders for the DAG bundle, plugins and config. The driver needs them to import the pipeline.
    """
    installed = tuple(
        str(Path(folder).resolve())
        for folder in (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), sys.prefix)
    )
    folders = [str(Path(entry).resolve()) for entry in sys.path if entry]
    return [f for f in dict.fromkeys(folders) if not f.startswith(installed) and not f.endswith(".zip")]


def _lines(process: subprocess.Popen[bytes] | WarmDriver) -> Iterator[str]:
    """Yield the lines of the driver's output until the driver ends, even if a child process keeps the pipe open."""
    assert process.stdout is not None
    supervisor, rest = os.getppid(), b""
    with process.stdout as pipe:
        while True:
            if select.select([pipe], [], [], _POLL_S)[0]:
                data = os.read(pipe.fileno(), 65536)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                yield from (line.decode(errors="replace").rstrip() for line in lines)
            elif process.poll() is not None:
                break
            if os.getppid() != supervisor:
                raise AirflowException(
                    "Airflow's supervisor of this task has died, so the task stopped its Spark driver"
                )
    if rest:
        yield rest.decode(errors="replace").rstrip()


def _in_groups(lines: Iterable[str]) -> Iterator[str]:
    """Yield `lines`, with Airflow's markers of a collapsible group around the JVM's log lines below ERROR."""
    grouped = False
    for line in lines:
        of_jvm = _JVM.match(line) is not None or (grouped and line.startswith("\t"))
        if of_jvm is not grouped:
            yield "::group::Spark" if of_jvm else "::endgroup::"
            grouped = of_jvm
        yield line
    if grouped:
        yield "::endgroup::"


def _read_result(path: Path, return_code: int, task: Any) -> dict[str, Any]:
    from state_backend.values.errors import Rerun

    if return_code < 0 or not path.exists():
        raise exit_failure(return_code)
    result = json.loads(path.read_text())
    if "error" in result:
        error = result["error"]
        command = f"\n{repair(task, Rerun.from_json(error['rerun']))}" if error.get("rerun") else ""
        raise failure(error["type"], error["message"] + command, error.get("awaited"))
    if return_code:
        raise exit_failure(return_code)
    ok: dict[str, Any] = result["ok"]
    return ok


def _signal_group(group: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal_number)
