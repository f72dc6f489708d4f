"""What the operators that start a Spark driver have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, get_current_context

from cairn_operators.driver_process import DriverProcess
from cairn_operators.google_connection import google_credentials
from cairn_operators.hidden_settings import Hidden, hide_secrets
from cairn_operators.spark_location import DEFAULT_CONN_ID, spark_location

if TYPE_CHECKING:
    from cairn.driver.driver_protocol import Request


class DriverOperator(BaseOperator):  # type: ignore[misc]  # Airflow is not type-checked here
    """A task that runs one command of ``cairn.driver.driver`` in a process of its own.

    Args:
        pipeline: The `Pipeline`, as ``module:NAME``.
        root: URL of the folder that holds the pipelines.
        spark_conn_id: Connection to Spark.
        gcp_conn_id: Connection with the key for a ``gs://`` root; None for application default credentials.
        spark_conf: Spark's configuration; the connection's configuration comes after it. Airflow shows it with the task, secrets as ``***``.

    Attributes:
        driver_module: Module with the driver's command line. Tests use another module.
    """

    template_fields: Sequence[str] = ("pipeline", "root", "spark_conn_id", "gcp_conn_id", "spark_conf")
    ui_color = "#e9d8c4"
    driver_module = "cairn.driver.driver"

    def __init__(
        self,
        *,
        pipeline: str,
        root: str,
        spark_conn_id: str = DEFAULT_CONN_ID,
        gcp_conn_id: str | None = None,
        spark_conf: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Shown with the task in the UI; an operator that says nothing better has what its users read in the code.
        super().__init__(**{"doc_md": inspect.cleandoc(type(self).__doc__ or ""), **kwargs})
        self.pipeline = pipeline
        self.root = root
        self.spark_conn_id = spark_conn_id
        self.gcp_conn_id = gcp_conn_id
        self.spark_conf = hide_secrets(spark_conf or {})
        self._driver: DriverProcess | None = None

    def render_template_fields(self, context: Any, jinja_env: Any = None) -> None:
        """Render the templates of this copy of the task."""
        # Airflow renders nested fields in place, and the copies of a task share them.
        self.spark_conf = {k: Hidden(v.text) if isinstance(v, Hidden) else v for k, v in self.spark_conf.items()}
        super().render_template_fields(context, jinja_env)
        # A value may have been the result of another task.
        self.spark_conf = hide_secrets(self.spark_conf)

    @property
    def dag_of_pipeline(self) -> str:
        """The DAG that commands in messages name: the one that processes the pipeline."""
        return str(self.dag_id)

    def run_driver(self, request: Request, on_line: Callable[[str], None] | None = None) -> dict[str, Any]:
        """The driver's result: ids and counts. Lists and dicts stay as they are; state never passes through here.
        ``on_line`` gets each line of its output; left out: the task log does."""
        from cairn.driver.driver_protocol import Call, to_arguments

        self._driver = DriverProcess(self.driver_module, self.dag_of_pipeline)
        try:
            spark = spark_location(self.spark_conn_id, self.spark_conf)
            self.log.info("Spark is %s", spark.url)
            private = {"token": spark.token, "conf": dict(spark.conf)} if spark.token or spark.conf else None
            task, again = _task()
            call = Call(
                pipeline=self.pipeline,
                root=self.root,
                spark=spark.url,
                task=task,
                again=again,
                settings_on_stdin=private is not None,
            )
            arguments = [request.command, *to_arguments(call), *to_arguments(request)]
            show = on_line or (lambda line: self.log.info("%s", line))
            with google_credentials(self.gcp_conn_id) as environment:
                return self._driver.run(arguments, show, environment, private)
        finally:
            self._driver = None

    def on_kill(self) -> None:
        """Airflow calls this from its SIGTERM handler and then lets ``execute`` go on. Without the exit, a task that was
        told to stop would report what the killed driver left, or go on to its next step. After a timeout ``execute`` has
        ended already: there is no driver, and Airflow raises the timeout itself."""
        if self._driver is not None:
            self._driver.stop()
            raise SystemExit("stopped by Airflow; the Spark driver is stopped too")


def _task() -> tuple[str | None, bool]:
    """Name the task, the same in all its tries, and say whether this is a later try."""
    try:
        ti = get_current_context()["ti"]
    except RuntimeError:
        return None, False  # Called without Airflow.
    return f"{ti.dag_id}/{ti.run_id}/{ti.task_id}/{ti.map_index}", ti.try_number > 1
