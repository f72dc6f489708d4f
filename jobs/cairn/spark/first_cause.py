"""The original error inside of Spark's wrapping errors."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from state_backend.values import errors
from state_backend.values.errors import CairnError

# Without indentation: an indented line belongs to a note, which may name other errors.
_RAISED = re.compile(r"^state_backend\.values\.errors\.(\w+): (.*)$", re.MULTILINE)
# Packages that this project imports in a worker. The processor's own error names packages that the user's code lacks.
_MISSING = re.compile(
    r"ModuleNotFoundError: No module named '(cairn|state_backend|rocksdict|google_crc32c|google|xxhash|pydantic|pyarrow|pandas|numpy)\b"
)
# Begins Spark's own text behind the worker's report.
_END = re.compile(r"\n\s*(at org\.apache|at java|SQLSTATE|\tat |JVM stacktrace|Driver stacktrace)")


@contextmanager
def first_cause() -> Iterator[None]:
    """Raise this project's own error again where Spark reports a worker's error under JVM frames.

    Notes of the worker, such as the traceback of user code, stay notes.
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
                    "Install what Cairn needs where executors run: pip install './cairn_state-0.1.0-py3-none-any.whl[spark,gcs]'\n"
                    "Or send a packed environment with spark.archives, and have spark.pyspark.python name its Python.\n"
                    "Cairn's own modules are sent by the driver of a master; on a Connect server install them too"
                ) from error
            raise
        # The last error reached Spark. Its causes are above.
        last = found[-1]
        translated = getattr(errors, last[1], CairnError)(last[2].strip())
        rest = text[last.end() :]
        end = _END.search(rest)
        notes = textwrap.dedent(rest[: end.start() if end else None].strip("\n")).rstrip()
        if notes:
            translated.add_note(notes)
        raise translated from None
