"""A sink that copies each interval's current output to plain Parquet files, for readers without Cairn.

    <folder>/interval=20130101T000000000Z_20130102T000000000Z/00000000000000000042-<attempt>-part-00000-7.parquet

The copy is **not atomic**, as docs/storage.md explains ("Output for other readers").

After its first copy an interval's folder always holds at least one complete result, with one exception: if an interval
with other boundaries replaces this interval, the sink first deletes the files of the replaced interval.

The sink does not touch files whose names have another form.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.fresh_listing import list_fresh, note_names
from state_backend.checkpoint.log import outputs_of, read_log
from state_backend.formats import paths
from state_backend.ports.storage import Storage, lists_late
from state_backend.values.errors import AlreadyExists, UsageError
from state_backend.values.handles import Handle
from state_backend.values.intervals import Interval
from state_backend.values.records import SweepRecord

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Copies of earlier releases have no attempt in their names.
_COPY = re.compile(r"interval=[^/]+/[0-9]{20}-(?:[^/]+-)?part-[^/]+\.parquet")


def copy_output(folder: str) -> Callable[[SparkSession | None, list[str], Interval, int], None]:
    """Return a `Pipeline.sink` that copies output files to the storage URL `folder`.

    Each call of the sink first copies those files of the interval that are missing in `folder`. Then the call deletes
    the copies of earlier results of the interval. So after any number of calls, `folder` holds the output of the last
    call.

    Args:
        folder: URL or absolute path of the folder for the copies.

    Raises:
        UsageError: The URL is wrong.
        CorruptFile: The sink found a damaged output file.
        StorageUnavailable: The sink can't reach the storage.
        UnknownOutcome: A write of the sink may or may not have taken effect.

    Example:
        Pipeline(..., sink=copy_output("gs://warehouse/clicks"))
    """
    open_storage(folder)  # Raise for a wrong URL now, at the pipeline's declaration.

    def sink(spark: SparkSession | None, files: list[str], interval: Interval, checkpoint_id: int) -> None:
        prefix, destination = f"interval={paths.interval_name(interval)}/", open_storage(folder)
        wanted = {}
        if files:
            root, named, _ = files[0].rpartition("/" + paths.OUTPUT)
            if not named:
                raise UsageError(
                    f"{files[0]!r} is not an output file of a pipeline; expected a file below the pipeline's output/"
                )
            source = open_storage(root)
            entry = read_log(source).entries[checkpoint_id]
            outputs = () if isinstance(entry, SweepRecord) else outputs_of(entry)
            for output in outputs:
                if not output.late:
                    # Ids begin again in a new folder of state, so the attempt's uuid tells the results apart.
                    name = "-".join(output.handle.path.split("/")[-2:])
                    wanted[f"{prefix}{checkpoint_id:020d}-{name}"] = output.handle
        there = list_fresh(destination, prefix)
        copies = [path for path in there if path not in wanted and _COPY.fullmatch(path)]
        note_names(destination, prefix, [path.removeprefix(prefix) for path in wanted])
        for path, handle in wanted.items():
            # Some storages list a file for a while after its deletion. So ask for the file by its name.
            if path not in there or (lists_late(destination) and destination.stat(path) is None):
                _copy(source, handle, destination, path)
        for path in copies:
            destination.delete(path)
        note_names(destination, prefix, [], drop=[path.removeprefix(prefix) for path in copies])

    # Readers of the folders take this column from the folder's name, so the output must not have it.
    sink.folder_column = "interval"  # type: ignore[attr-defined]
    return sink


def _copy(source: Storage, handle: Handle, destination: Storage, path: str) -> None:
    """Copy one output file, not as a hard link: a program that writes into the link would change the output file."""
    try:
        if not isinstance(source, LocalStorage):
            destination.copy_from(source, handle, path)
            return
        with work_folder("copy") as folder:
            source.download(handle, folder / "file")
            destination.upload(path, folder / "file")
    except AlreadyExists:
        pass  # Another task has copied the same file of the same checkpoint, so the bytes are equal.
