"""Find the pipelines below a root."""

from __future__ import annotations

from state_backend.adapters.open_storage import folders_in, join_url, open_storage
from state_backend.checkpoint.parallel import at_once
from state_backend.formats import paths
from state_backend.values.errors import CairnError
from state_backend.values.similar_names import did_you_mean


def pipelines_below(root: str) -> list[str]:
    """Return the sorted names of the pipelines below a root: its folders with a log.

    Args:
        root: URL of the folder that holds all pipelines.
    """
    names = [name for name in folders_in(root, "") if paths.is_name(name)]
    logs = at_once(lambda name: open_storage(join_url(root, name)).stat(paths.record(1)), names)
    return [name for name, log in zip(names, logs, strict=True) if log is not None]


def other_pipelines(root: str, pipeline: str) -> str:
    """Return `did_you_mean` for a pipeline that does not exist; an empty text if the root can't be listed."""
    try:
        return did_you_mean(pipeline, pipelines_below(root))
    except CairnError:
        return ""
