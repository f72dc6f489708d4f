"""Evaluate a pipeline's Great Expectations suites on the tables of its states.

`Suites` evaluates the expectations of one validation. `Rows` is the part that depends on the kind of the tables, which
are Spark DataFrames or Arrow tables.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from cairn.change_expectations import ChangeExpectations
from cairn.operations.validation.checks import Check, FailingRows
from cairn.pipeline import Pipeline
from state_backend.values.errors import UsageError
from state_backend.values.release import WHEEL

OVER_TIME = " over time"
_SITE = "local"
_SHOWN_VALUES = 5
_LONGEST = 500
_DOMAIN = ("batch_id", "column", "column_A", "column_B", "column_list", "column_set")


@dataclass(frozen=True, slots=True)
class Table:
    label: str  # Appended to the state's name: "", or `OVER_TIME` for the table of changes.
    frame: Any
    identity: Sequence[str]  # Names of the columns that identify a row.
    expectations: Sequence[Any]


def read_declared(
    pipeline: Pipeline, states: Collection[str], *, with_base: bool
) -> tuple[dict[str, Sequence[Any]], dict[str, ChangeExpectations]]:
    """Return (expectations by state, expectations on changes by state). Without a base, the second is empty."""
    suites = dict(pipeline.expectations()) if pipeline.expectations is not None else {}
    over_time: dict[str, ChangeExpectations] = {}
    if pipeline.expectations_over_time is not None and with_base:
        over_time = dict(pipeline.expectations_over_time())
    for name in {*suites, *over_time} - {*states}:
        raise UsageError(
            f"pipeline {pipeline.name!r} has expectations for a state {name!r}, but no such state exists; its states are {', '.join(sorted(states))}"
        )
    return suites, over_time


def over_changes(over_time: ChangeExpectations) -> list[Any]:
    import great_expectations.expectations as gxe

    return [*over_time.pairs, *([gxe.ExpectColumnValuesToBeNull(column="lost_row")] if over_time.no_row_lost else [])]


class Rows(Protocol):
    """Adapter of one kind of tables, Spark's or Arrow's, to Great Expectations, for `Suites`."""

    def source(self, context: Any) -> Any:
        """Add a data source to a context of Great Expectations, and return the data source."""

    def frame(self, table: Any) -> Any:
        """Return a table in the form that the data source takes."""

    def failing(self, batch: Any, expectation: Any, metric: str, identity: Sequence[str]) -> FailingRows:
        """Store the rows of `batch` that fail an expectation, by its `metric`. Return their number and first keys."""


class Suites:
    """Runner of each table's expectations in Great Expectations, which collects the checks and builds the Data Docs."""

    def __init__(self, pipeline: Pipeline, run_name: str, docs: Path | None) -> None:
        try:
            import great_expectations as gx
        except ModuleNotFoundError as error:
            raise UsageError(
                f"pipeline {pipeline.name!r} has expectations, but {socket.gethostname()} lacks Great Expectations ({error}); install it "
                f"where drivers run: pip install './{WHEEL}[validation]'"
            ) from None

        self.checks: list[Check] = []
        self.counts: dict[str, tuple[int, int]] = {}  # By state: numbers of evaluated and failed expectations.
        self._pipeline, self._run_name = pipeline, run_name
        self._sources: dict[type, Any] = {}  # The data source of Great Expectations for each class of tables.
        self._built: list[tuple[str, Any]] = []  # For the Data Docs: names of tables, and ids of their results.
        self._docs = docs is not None
        if docs is None:
            self._context = gx.get_context(mode="ephemeral")
        else:
            self._context = _with_docs(docs / pipeline.name)
        self._context.variables.progress_bars = {"globally": False}

    def run(self, state: str, tables: Sequence[Table], rows: Rows) -> None:
        found = [
            check for table in tables if table.expectations for check in self._run(f"{state}{table.label}", table, rows)
        ]
        self.checks += found
        self.counts[state] = len(found), sum(not check.success for check in found)

    def build_docs(self) -> dict[str, str]:
        """Build Great Expectations' Data Docs of all tables. Return the path of each table's page, by table."""
        if not self._docs or not self._built:
            return {}
        self._context.build_data_docs(site_names=[_SITE], resource_identifiers=[i for _, i in self._built])
        pages = {}
        for name, identifier in self._built:
            (site,) = self._context.get_docs_sites_urls(resource_identifier=identifier, site_name=_SITE)
            pages[name] = unquote(urlsplit(site["site_url"]).path)
        return pages

    def _run(self, name: str, table: Table, rows: Rows) -> Iterator[Check]:
        import great_expectations as gx

        context = self._context
        if type(rows) not in self._sources:
            self._sources[type(rows)] = rows.source(context)
        batch = self._sources[type(rows)].add_dataframe_asset(name).add_batch_definition_whole_dataframe("all")
        # A suite gives each of its expectations an id, and refuses an expectation that has one. The copies let a caller
        # evaluate the same expectations again.
        own = [expectation.copy(update={"id": None}) for expectation in table.expectations]
        suite = gx.ExpectationSuite(name=f"{self._pipeline.name}.{name}", expectations=own)
        definition = gx.ValidationDefinition(name=name, data=batch, suite=context.suites.add(suite))
        checkpoint = context.checkpoints.add(
            gx.Checkpoint(
                name=name,
                validation_definitions=[context.validation_definitions.add(definition)],
                result_format={"result_format": "SUMMARY"},
            )
        )
        given = {"dataframe": rows.frame(table.frame)}
        result = checkpoint.run(batch_parameters=given, run_id=gx.RunIdentifier(run_name=self._run_name))
        for identifier, run in result.run_results.items():
            self._built.append((name, identifier))
            for one in run.results:
                _check_evaluated(name, one, list(given["dataframe"].columns))
                failing = None
                if not one.success and (metric := _metric_of(one)) is not None:
                    loaded = batch.get_batch(batch_parameters=given)
                    failing = rows.failing(loaded, one.expectation_config, metric, table.identity)
                yield _check(name, one, failing)


def _with_docs(folder: Path) -> Any:
    """Return a Great Expectations context that writes Data Docs into the folder.

    The results are kept beside the pages, in `results`. Great Expectations deletes each page whose result it does not
    find. So without kept results it would delete the pages of all earlier runs.
    """
    import great_expectations as gx
    from great_expectations.data_context.types.base import DataContextConfig, InMemoryStoreBackendDefaults

    folder.mkdir(parents=True, exist_ok=True)

    def files(path: Path) -> dict[str, str]:
        return {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(path)}

    stores = InMemoryStoreBackendDefaults()
    stores.stores[stores.validation_results_store_name]["store_backend"] = files(folder / "results")
    context = gx.get_context(project_config=DataContextConfig(store_backend_defaults=stores), mode="ephemeral")
    index = {"class_name": "DefaultSiteIndexBuilder"}
    site = {"class_name": "SiteBuilder", "site_index_builder": index, "store_backend": files(folder)}
    context.add_data_docs_site(_SITE, {**site, "show_how_to_buttons": False})
    return context


def _check_evaluated(table: str, result: Any, columns: Sequence[str]) -> None:
    config = result.expectation_config
    for raised in _exceptions(result.exception_info):
        raise UsageError(
            f"state {table!r}: {f'{config.type} {_columns(config.kwargs)}'.rstrip()} could not be evaluated: {raised}\n"
            f"The expectation is wrong, not the data. The columns of the table are {', '.join(columns)}\n"
            "Fix the expectation in the pipeline, then validate again. Nothing was marked"
        )


def _metric_of(result: Any) -> str | None:
    """Return the metric that tells which rows fail; None if no row fails, or if the expectation is not about rows."""
    from great_expectations.expectations.registry import get_expectation_impl

    metric = getattr(get_expectation_impl(result.expectation_config.type), "map_metric", None)
    return metric if isinstance(metric, str) and result.result.get("unexpected_count") else None


def metric_value(batch: Any, expectation: Any, name: str) -> Any:
    from great_expectations.expectations.registry import get_metric_kwargs
    from great_expectations.validator.metric_configuration import MetricConfiguration
    from great_expectations.validator.metrics_calculator import MetricsCalculator

    whole = {"result_format": "COMPLETE", "partial_unexpected_count": 0}
    kwargs = get_metric_kwargs(name, expectation, {"result_format": whole})
    metric = MetricConfiguration(
        metric_name=name,
        metric_domain_kwargs={**kwargs["metric_domain_kwargs"], "batch_id": batch.id},
        metric_value_kwargs=kwargs["metric_value_kwargs"],
    )
    return MetricsCalculator(execution_engine=batch.data.execution_engine).get_metric(metric)


def _columns(kwargs: Mapping[str, Any]) -> str:
    several = kwargs.get("column_list") or kwargs.get("column_set") or ()
    names = [kwargs[name] for name in ("column", "column_A", "column_B") if kwargs.get(name)]
    return ", ".join(map(str, [*names, *several]))


def _check(table: str, result: Any, failing: FailingRows | None) -> Check:
    config, said = result.expectation_config, result.result
    expected = ", ".join(f"{k}={v!r}" for k, v in config.kwargs.items() if k not in _DOMAIN and v is not None)
    if "unexpected_count" in said:
        # Great Expectations counts None instead of 0 in an empty table.
        observed = f"{said['unexpected_count'] or 0:,} of {said['element_count'] or 0:,} rows fail"
        unexpected = map(_value_text, said.get("partial_unexpected_list") or ())
        values = [text for text in dict.fromkeys(unexpected) if text][:_SHOWN_VALUES]
        if values and config.kwargs.get("column") != "lost_row":  # Its values are the keys, which `failing` has.
            observed += f", with values such as {', '.join(values)}"
    else:
        observed = str(said.get("observed_value", "no value" if result.success else "the expectation is not met"))
    return Check(
        table=table,
        what=config.type,
        column=_columns(config.kwargs),
        expected=_short(expected),
        observed=_short(observed),
        success=bool(result.success),
        failing=failing,
    )


def _value_text(value: Any) -> str:
    """Return a value as text, the same for values from Spark and from Arrow; an empty text for a missing value.

    Spark returns an instant as naive datetime in the local zone, Arrow as aware datetime. A missing value is None in
    Spark and `pandas.NA` in Arrow.
    """
    if isinstance(value, tuple):
        return f"({', '.join(_value_text(part) or 'None' for part in value)})"
    if isinstance(value, datetime):
        plain = datetime.fromisoformat(value.isoformat())  # `value` may be a `pandas.Timestamp`, which prints more.
        return str(plain if plain.tzinfo is None else plain.astimezone().replace(tzinfo=None))
    return "" if value is None or type(value).__name__ == "NAType" else str(value)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _exceptions(info: Mapping[str, Any]) -> list[str]:
    """Return the messages of the exceptions that an expectation raised, from its `exception_info`.

    Great Expectations gives one flat dict if the expectation raised nothing, else one dict for each metric.
    """
    entries = [info] if "raised_exception" in info else [v for v in info.values() if isinstance(v, Mapping)]
    return [str(e.get("exception_message")) for e in entries if e.get("raised_exception")]
