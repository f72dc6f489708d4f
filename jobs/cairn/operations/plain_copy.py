"""A sink for readers that know nothing of checkpoints: each interval's current output as plain Parquet files.

    <to>/interval=20130101T000000000Z_20130102T000000000Z/00000000000000000042-part-00000-7.parquet

**Not atomic.** While an interval is published, its folder grows file by file; while a re-run replaces it, the files of both
results are there for a moment, and then those of the older one go one by one. Never is there less than one whole result once the
first was there, unless an interval that is cut otherwise replaced it: then its files go first. Who must not see such a moment reads
``format("keyed_output")``. Files of other names in the folder stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from state_backend.adapters.local_storage import LocalStorage
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.work_folders import work_folder
from state_backend.checkpoint.fresh_listing import listed, note_names
from state_backend.checkpoint.log import outputs_of, read_log
from state_backend.formats import paths
from state_backend.ports.storage import Storage, lists_late
from state_backend.values.errors import AlreadyExists, UsageError
from state_backend.values.handles import Handle
from state_backend.values.intervals import Interval
from state_backend.values.records import SweepRecord

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COPY = re.compile(r"interval=[^/]+/([0-9]{20})-part-[^/]+\.parquet")


def plain_copy(to: str) -> Callable[[SparkSession | None, list[str], Interval, int], None]:
    """A ``Pipeline.sink`` that copies to the storage URL ``to``. Again for the same checkpoint it completes what is missing; what
    it leaves depends on the last call for an interval only, so that the coordinator's repeats end with the current output.

    Raises: CorruptFile for an output that is damaged; StorageUnavailable, UnknownOutcome.
    """
    open_storage(to)  # a wrong URL is told where the pipeline is declared

    def sink(spark: SparkSession | None, files: list[str], interval: Interval, checkpoint_id: int) -> None:
        folder, destination = f"interval={paths.interval_name(interval)}/", open_storage(to)
        wanted = {}
        if files:
            source = open_storage(_root_of(files[0]))
            entry = read_log(source).entries[checkpoint_id]
            outputs = () if isinstance(entry, SweepRecord) else outputs_of(entry)
            for output in outputs:
                if not output.late:
                    name = output.handle.path.rpartition("/")[2]
                    wanted[f"{folder}{checkpoint_id:020d}-{name}"] = output.handle
        there = listed(destination, folder)
        copies = [path for path in there if path not in wanted and _COPY.fullmatch(path)]
        note_names(destination, folder, [path.removeprefix(folder) for path in wanted])
        for path, handle in wanted.items():
            # By its name: a listing may show a file that is gone.
            if path not in there or (lists_late(destination) and destination.stat(path) is None):
                _copy(source, handle, destination, path)
        for path in copies:
            destination.delete(path)
        note_names(destination, folder, [], drop=[path.removeprefix(folder) for path in copies])

    return sink


def _copy(source: Storage, handle: Handle, destination: Storage, path: str) -> None:
    """Not by a hard link: whoever writes into the copy must not write into the output."""
    try:
        if not isinstance(source, LocalStorage):
            destination.copy_from(source, handle, path)
            return
        with work_folder("copy") as folder:
            source.download(handle, folder / "file")
            destination.upload(path, folder / "file")
    except AlreadyExists:
        pass  # another task publishes the same checkpoint: its bytes are these


def _root_of(url: str) -> str:
    """The pipeline's folder that an output file's URL lies in."""
    root, output, _ = url.rpartition("/" + paths.OUTPUT)
    if not output:
        raise UsageError(f"{url!r} is no output file of a pipeline; expected one below its output/")
    return root
