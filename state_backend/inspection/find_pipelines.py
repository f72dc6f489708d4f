"""Find the pipelines below a root."""

from __future__ import annotations

from state_backend.adapters.open_storage import folders_in, join_url, open_storage
from state_backend.checkpoint.parallel import at_once
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.values.errors import CairnError, UsageError
from state_backend.values.similar_names import DID_YOU_MEAN, did_you_mean


def pipelines_below(root: str) -> list[str]:
    """Return the sorted names of the pipelines below a root: its folders with a log, or with a trace of a lost one."""
    names = [name for name in folders_in(root, "") if paths.is_name(name)]
    found = at_once(lambda name: _is_pipeline(open_storage(join_url(root, name))), names)
    return [name for name, is_pipeline in zip(names, found, strict=True) if is_pipeline]


def _is_pipeline(storage: Storage) -> bool:
    if storage.stat(paths.record(1)) is not None or storage.stat(paths.HEAD) is not None:
        return True
    return next(iter(storage.list(paths.SETTLED)), None) is not None


def other_pipelines(root: str, pipeline: str) -> str:
    """Return `did_you_mean` for a pipeline that does not exist; an empty text if the root can't be listed."""
    try:
        return did_you_mean(pipeline, pipelines_below(root))
    except CairnError:
        return ""


def refuse_nothing(storage: Storage, root: str, pipeline: str, *, if_new: str = "") -> None:
    """Raise `UsageError` if a pipeline's folder has no files. The message names similar pipelines of the root.

    `if_new`: Advice for a pipeline that never ran, which the message gets if no name is similar.
    """
    if next(iter(storage.list("")), None) is None:
        other = other_pipelines(root, pipeline)
        raise UsageError(
            f"no pipeline at {storage.url}: the folder has no files; check the root and the pipeline's name"
            f"{other}{'' if DID_YOU_MEAN in other else if_new}"
        )
