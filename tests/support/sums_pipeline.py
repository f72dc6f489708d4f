"""The module of a pipeline, for tests that put it beside a DAG in another folder. `factor` is a module of the test."""

SUMS_PIPELINE = """
from datetime import UTC, datetime
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import Row
from cairn import Pipeline
from factor import FACTOR

def source(spark, interval):
    return spark.createDataFrame([("ann", 1), ("bob", 2)], "user string, amount long")

class Sum(StatefulProcessor):
    def init(self, handle):
        self._sum = handle.getValueState("sum", "total long")

    def handleInputRows(self, key, rows, timerValues):
        total = (self._sum.get() or (0,))[0] + FACTOR * sum(row.amount for row in rows)
        self._sum.update((total,))
        yield Row(user=key[0], total=total)

SUMS = Pipeline(name="sums", start=datetime(2024, 1, 1, tzinfo=UTC), source=source, key=["user"], processor=Sum,
                output_schema="user string, total long", parallelism=1, max_parallelism=8)
"""
WITHOUT_FACTOR = SUMS_PIPELINE.replace("from factor import FACTOR", "FACTOR = 1")
