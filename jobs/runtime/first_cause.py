"""The one error that matters, out of what Spark wraps around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from state_backend.values import errors
from state_backend.values.errors import CairnError

_RAISED = re.compile(r"^\s*(?:state_backend\.values\.errors\.)(\w+): (.*)$", re.MULTILINE)


@contextmanager
def first_cause() -> Iterator[None]:
    """Raises our own error again where Spark reports one from a worker under its JVM frames. The Python traceback of the
    worker, user code included, comes with it as a note."""
    try:
        yield
    except CairnError:
        raise
    except Exception as error:
        text = str(error)
        found = _RAISED.findall(text)
        if not found:
            raise
        # The last one is what reached Spark; what caused it stands above it in the traceback.
        name, message = found[-1]
        cls = getattr(errors, name, CairnError)
        translated: CairnError = cls(message.strip())
        start, end = text.find("Traceback (most recent call last)"), text.find("\n\tat ")
        if start >= 0:
            translated.add_note(text[start : end if end > start else None].rstrip())
        raise translated from None
