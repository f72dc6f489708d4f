"""Load the pipeline that `module:NAME` names."""

from __future__ import annotations

import importlib
import sys
import textwrap
import traceback

from cairn.pipeline import Pipeline
from cairn.runners.user_code import user_text
from cairn.shipping.user_modules import note_imported
from state_backend.values.errors import CairnError, UsageError


def load_pipeline(reference: str) -> Pipeline:
    """Return the `Pipeline` that a reference such as `pipelines.clicks:CLICKS` names."""
    module, _, name = reference.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise UsageError(
            f"{reference!r} does not name a pipeline; write it as module:NAME, as in pipelines.clicks:CLICKS"
        )
    before = set(sys.modules)
    try:
        loaded = importlib.import_module(module)
    except CairnError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            folders = "\n".join(f"  {folder}" for folder in sys.path if folder)
            raise UsageError(
                f"can't load the pipeline {reference!r}: there is no module {error.name!r}\n"
                "Put the module into an installed package, beside the DAG at the root of its bundle, or on the PYTHONPATH. "
                f"Python searched:\n{folders}"
            ) from None
        raised = UsageError(
            f"can't load the pipeline {reference!r}: importing {module} raised {type(error).__name__}: {user_text(error)}\n"
            "Fix that module. Nothing was read or computed"
        )
        raised.add_note(textwrap.indent(_own_traceback(error), "  "))
        raise raised from error
    note_imported(sys.modules.keys() - before)
    found = getattr(loaded, name, None)
    if isinstance(found, Pipeline):
        return found
    there = [f"{module}:{n}" for n, value in vars(loaded).items() if isinstance(value, Pipeline)]
    what = "is not there" if found is None else f"is a {type(found).__name__}, not a Pipeline"
    raise UsageError(
        f"{reference!r} {what}\n{getattr(loaded, '__file__', module)} has these pipelines: {', '.join(there) or 'none'}"
    )


def _own_traceback(error: BaseException) -> str:
    """Return the traceback of a failed import as text, without the frames of Python's import system."""
    formatted = traceback.TracebackException.from_exception(error)
    formatted.stack[:] = [f for f in formatted.stack if "importlib" not in f.filename and f.filename != __file__]
    return "".join(formatted.format()).rstrip()
