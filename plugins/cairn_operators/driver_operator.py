"""The base class of the operators that start a Spark driver."""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, get_current_context

from cairn_operators.airflow_versions import AirflowFailException
from cairn_operators.driver_process import DriverProcess
from cairn_operators.failures import UserCodeFailed
from cairn_operators.hidden_settings import Hidden, hide_secrets
from cairn_operators.retries import check_failures
from cairn_operators.spark_location import DEFAULT_CONN_ID, spark_location
from cairn_operators.storage_connection import storage_credentials

if TYPE_CHECKING:
    from state_backend.values.operation_parameters import Request

# Key in Airflow's state store of the task: the UUID of the latest driver's session on a Spark Connect server.
_SESSION_KEY = "cairn_spark_session"


class DriverOperator(BaseOperator):  # type: ignore[misc]  # Airflow is not type-checked here
    """The base class of a task that runs one command of `cairn.driver.driver` in a child process."""

    template_fields: Sequence[str] = ("code", "root", "spark_conn_id", "storage_conn_id", "spark_conf")
    ui_color = "#e9d8c4"
    driver_module = "cairn.driver.driver"

    def __init__(
        self,
        *,
        code: str,
        root: str,
        spark_conn_id: str = DEFAULT_CONN_ID,
        storage_conn_id: str | None = None,
        spark_conf: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Airflow's UI shows `doc_md` with the task. If the caller gives none, it is the docstring of the class.
        super().__init__(**{"doc_md": inspect.cleandoc(type(self).__doc__ or ""), **kwargs})
        self.code = code
        self.root = root
        self.spark_conn_id = spark_conn_id
        self.storage_conn_id = storage_conn_id
        self.spark_conf = hide_secrets(spark_conf or {})
        self._driver: DriverProcess | None = None

    def render_template_fields(self, context: Any, jinja_env: Any = None) -> None:
        """Render the templates of this copy of the task, and hide secrets among the rendered values."""
        # Airflow renders templates in place, and all copies of a task share the `Hidden` values of `spark_conf`. So
        # each copy gets its own `Hidden` values before it is rendered.
        self.spark_conf = {k: Hidden(v.text) if isinstance(v, Hidden) else v for k, v in self.spark_conf.items()}
        super().render_template_fields(context, jinja_env)
        # Rendering can put a secret into a value, such as the output of another task.
        self.spark_conf = hide_secrets(self.spark_conf)

    @property
    def dag_of_pipeline(self) -> str:
        """The id of the DAG that processes the pipeline, for commands in error messages."""
        return str(self.dag_id)

    def run_and_collect(self, request: Request) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Run one command in a driver. Return (result, summaries), with a summary of each checkpoint it committed."""
        from state_backend.values.operation_parameters import COMMITTED

        committed: list[dict[str, Any]] = []

        def line(text: str) -> None:
            if text.startswith(COMMITTED):
                committed.append(json.loads(text.removeprefix(COMMITTED)))
            else:
                self.log.info("%s", text)

        return self.run_driver(request, on_line=line), committed

    def run_driver(self, request: Request, on_line: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Run one command in a driver process, and return its result. `on_line` gets each output line; None logs it."""
        from state_backend.values.hide_secrets import hide
        from state_backend.values.operation_parameters import Call, to_json
        from state_backend.values.release import RELEASE

        asked: Any = {}
        with suppress(RuntimeError):  # Raised if the operator runs outside of Airflow: there is no context.
            asked = get_current_context()
            check_conf(getattr(asked.get("dag_run"), "conf", None) or {}, getattr(asked.get("dag"), "params", ()))
        self._driver = DriverProcess(self.driver_module, self)
        try:
            spark = spark_location(self.spark_conn_id, self.spark_conf)
            self.log.info("Spark runs at %s", spark.url)
            private = {"token": spark.token, "conf": dict(spark.conf)} if spark.token or spark.conf else None
            session, former = _sessions() if spark.url.startswith("sc://") else (None, None)
            on_stdin = private is not None
            call = Call(spark=spark.url, session=session, former=former, settings_on_stdin=on_stdin, release=RELEASE)
            arguments = [request.command, to_json(request), "--call", to_json(call)]
            if leaking := next((one for one in arguments if hide(one) != one), None):
                raise AirflowFailException(
                    f"the argument {hide(leaking)!r} contains credentials, and every user of the host can read the Spark driver's "
                    "arguments. Leave them out, and put them into the connections that spark_conn_id and storage_conn_id name"
                )
            show = on_line or (lambda line: self.log.info("%s", line))
            with storage_credentials(self.storage_conn_id) as environment:
                return self._driver.run(arguments, show, environment, private)
        except UserCodeFailed as error:
            if "ti" in asked:
                check_failures(error, self, asked["ti"])
            raise
        finally:
            self._driver = None

    def on_kill(self) -> None:
        """Stop the driver and end this process.

        Airflow calls this from its SIGTERM handler, and `execute` continues when the handler returns. Without the exit,
        a stopped task would report the result of the killed driver, or begin its next step. After a timeout, `execute`
        has already ended and no driver runs. Then this method does nothing, and Airflow reports the timeout.
        """
        if self._driver is not None:
            self._driver.stop()
            raise SystemExit("Airflow stopped this task, and the task stopped its Spark driver")


def check_conf(conf: Mapping[str, Any], params: Iterable[str]) -> None:
    """Raise `AirflowFailException` if a run's configuration `conf` misspells one of the DAG's `params`.

    Airflow would ignore a misspelt parameter. Names that resemble no parameter pass: they may be for other tasks.
    """
    from state_backend.values.similar_names import similar_to

    known = sorted(params)
    for name in conf:
        if name not in known and (meant := similar_to(name.lower(), known)):
            raise AirflowFailException(
                f"the run's configuration has {name!r}, which is no parameter of this DAG{meant}"
            )


def _sessions() -> tuple[str, str | None]:
    """Return (new, previous): UUIDs of the Spark sessions of this try and of the try before (None in a first try).

    Airflow's task state store keeps the new UUID. If this driver is killed, the next try ends the session it left.
    """
    session = str(uuid.uuid4())
    try:
        context = get_current_context()
    except RuntimeError:
        return session, None  # The operator runs outside of Airflow.
    store = context.get("task_state_store")
    if store is None:
        return session, None
    former = store.get(_SESSION_KEY) or None if context["ti"].try_number > 1 else None
    store.set(_SESSION_KEY, session)
    return session, former
