"""Recover the error of Cairn that a worker raised from the error that Spark reports on the driver."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from cairn.spark.last_words import explain_death
from state_backend.values import errors
from state_backend.values.errors import CairnError
from state_backend.values.release import WHEEL

# Match at the start of a line only. Indented lines are notes of the exception (`add_note`), which may name other
# errors.
_RAISED = re.compile(r"^state_backend\.values\.errors\.(\w+): (.*)$", re.MULTILINE)
# Packages that Cairn itself imports in a worker. Packages of user code need no pattern: if one is missing, the worker
# raises a ProcessorError that names the package.
_MISSING = re.compile(
    r"ModuleNotFoundError: No module named '(cairn|state_backend|rocksdict|google_crc32c|google|xxhash|pydantic|pyarrow|pandas|numpy)\b"
)
_PYTHONS = re.compile(r"PYTHON_VERSION_MISMATCH.*different version: ([\d.]+) than that in driver: ([\d.]+)")
# The start of Spark's own text after the worker's report.
_END = re.compile(r"\n\s*(at org\.apache|at java|SQLSTATE|\tat |JVM stacktrace|Driver stacktrace)")


@contextmanager
def first_cause() -> Iterator[None]:
    """If Spark raises an error in the block, raise instead the error of Cairn that a worker raised.

    Spark reports the worker's error only as text, below frames of the JVM. Notes of the worker's error, such as the
    traceback of user code, become notes of the raised error.
    """
    try:
        yield
    except CairnError:
        raise
    except Exception as error:
        text = str(error)
        found = list(_RAISED.finditer(text))
        if not found:
            if missing := _MISSING.search(text):
                raise errors.UsageError(
                    f"a Python worker of Spark lacks the package {missing[1]}\n"
                    f"Install what Cairn needs where executors run: pip install './{WHEEL}[spark,gcs]'\n"
                    "Or send a packed environment with spark.archives, and set spark.pyspark.python to its Python.\n"
                    "With a Spark master, the driver sends Cairn's own modules. On a Spark Connect server, install them too"
                ) from error
            if pythons := _PYTHONS.search(text):
                raise errors.UsageError(
                    f"Spark's workers run Python {pythons[1]}, and the driver Python {pythons[2]}. Both need the same minor "
                    f"version\nSet spark.pyspark.python to a Python {pythons[2]} on the executors, or run drivers with Python "
                    f"{pythons[1]}\nA Spark Connect server takes its workers' Python from PYSPARK_PYTHON, where it is started"
                ) from error
            if died := explain_death(text):
                raise died from None
            raise
        # The worker's traceback lists the causes of an error before the error. So the last match is the error itself.
        last = found[-1]
        translated = getattr(errors, last[1], CairnError)(last[2].strip())
        rest = text[last.end() :]
        end = _END.search(rest)
        notes = textwrap.dedent(rest[: end.start() if end else None].strip("\n")).rstrip()
        if notes:
            translated.add_note(notes)
        raise translated from None
