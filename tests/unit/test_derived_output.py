"""The schema of the output, where the processor derives it from the input."""

import pyarrow as pa
import pytest

from cairn.aggregates import Count, RunningAggregate, Sum
from cairn.arrow_processor import ArrowProcessor, BatchResult
from cairn.errors import ProcessorError, UsageError
from cairn.spark_versions import to_arrow_schema
from cairn.testing import PipelineTester
from tests.support.arrow_driver import KEYS, SCHEMA, ArrowDriver, Everything, Handle
from tests.support.bare_pipeline import bare_pipeline


class Clicks(RunningAggregate):
    clicks = Count()
    spent = Sum("amount")


class Silent(ArrowProcessor):
    def init(self, handle):
        pass

    def handleBatch(self, batch):
        return BatchResult()


class Failing(Silent):
    def deriveOutputSchema(self, handle):
        raise KeyError("amount")


def pipeline(processor, **settings):
    return bare_pipeline(processor, **{"name": "clicks", "key": ["user"], "api": "arrow", **settings})


def run(declared):
    return PipelineTester(declared, input_schema="User string, amount decimal(9,2)").run([("ann", None), ("ann", None)])


def test_a_running_aggregate_derives_its_output():
    assert run(pipeline(Clicks)).output == [{"User": "ann", "clicks": 2, "spent": None}]


def test_each_aggregate_derives_the_type_that_it_puts_out():
    rows = pa.Table.from_pylist([dict.fromkeys(SCHEMA.names)], SCHEMA)
    driver = ArrowDriver(Everything(), SCHEMA, KEYS)
    derived = Everything().deriveOutputSchema(driver.handle)
    assert isinstance(driver.handle, Handle)
    assert to_arrow_schema(derived) == driver.run(rows).schema


@pytest.mark.parametrize(
    ("declared", "error", "message"),
    [
        (pipeline(Silent), UsageError, "output_schema is missing, and Silent does not derive it"),
        (pipeline(Silent, api="row"), UsageError, "output_schema is missing"),
        (pipeline(Failing), ProcessorError, "Failing.deriveOutputSchema failed on the driver: KeyError"),
        (
            pipeline(type("Off", (RunningAggregate,), {"n": Sum("price")})),
            UsageError,
            "the input has no column 'price'",
        ),
    ],
)
def test_a_missing_output_schema_that_can_not_be_derived_is_refused(declared, error, message):
    with pytest.raises(error, match=message):
        run(declared)
