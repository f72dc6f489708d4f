"""Options of a JVM that Cairn starts: an archive of Spark's classes, and a later start of the optimising compiler.

With the archive, a JVM starts with about 40 % less CPU time.

A JVM loads and verifies some 20,000 classes until Spark has run a first query. `cairn spark --prepare` writes these
classes to an archive (class data sharing), which later JVMs map into memory.

A JVM ignores an archive that was made with another Java, other jars or another class path. So an archive never changes
a result.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path

from state_backend.values.environment import environment as set_within

_PREFIX, _SUFFIX, _NEW = "spark-classes-", ".jsa", "new-"
_VARIABLE = "SPARK_SUBMIT_OPTS"
# HotSpot's optimising compiler (tier 4) took 60 % of a JVM's CPU time in 120 small intervals. With forty times its
# default thresholds, it takes 28 %. The loops over a large interval's rows still reach the thresholds at once.
_OPTIMISE_LATER = " ".join(
    ["-XX:+IgnoreUnrecognizedVMOptions"]
    + [
        f"-XX:Tier4{name}Threshold={40 * default}"
        for name, default in (("Invocation", 5000), ("MinInvocation", 600), ("Compile", 15_000), ("BackEdge", 40_000))
    ]
)


def archive_path(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the archive for this Python environment, its Spark and its Java; None without Java or Spark.

    The path contains a hash of the files of Java and Spark, so it changes if one of them is updated.
    """
    home = environment.get("JAVA_HOME")
    java = str(Path(home, "bin/java")) if home else shutil.which("java", path=environment.get("PATH"))
    spark = find_spec("pyspark")
    if java is None or spark is None or spark.origin is None:
        return None
    try:
        parts = [_stamp(Path(java)), _stamp(Path(spark.origin).parent / "jars")]
    except OSError:
        return None
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return Path(sys.prefix, "share", "cairn", f"{_PREFIX}{key}{_SUFFIX}")


def _stamp(path: Path) -> tuple[str, int, int]:
    found = path.resolve(strict=True)
    return str(found), found.stat().st_mtime_ns, found.stat().st_size


def with_jvm_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with Cairn's options for a JVM of `spark-submit`. Options that it already has win."""
    options, path = [_OPTIMISE_LATER, environment.get(_VARIABLE)], archive_path(environment)
    if path is not None and path.is_file():
        # `-Xlog`: A JVM that can't use the archive would else print a warning between the lines of the user's program.
        options.append(f"-XX:SharedArchiveFile={path} -Xlog:cds=off -Xlog:cds+dynamic=off")
    return {**environment, _VARIABLE: " ".join(filter(None, options))}


def recording(environment: Mapping[str, str], archive: Path) -> dict[str, str]:
    """Return `environment` with the option by which a JVM of `spark-submit` writes `archive` when it exits."""
    return {**environment, _VARIABLE: f"-XX:ArchiveClassesAtExit={archive} -Xlog:cds=off -Xlog:cds+dynamic=off"}


def jvm_options_in_use() -> AbstractContextManager[None]:
    """Return a context in which a JVM that PySpark starts for this process gets Cairn's options."""
    return set_within({_VARIABLE: with_jvm_options(os.environ)[_VARIABLE]})


def install(made: Path, path: Path) -> None:
    """Move a new archive to its path, and delete the archives of other versions of Java and Spark."""
    # Write the file to the disk before the rename. Otherwise a power failure could leave an archive with missing data,
    # which could crash each JVM: a JVM checks only the header.
    with made.open("rb") as file:
        os.fsync(file.fileno())
    made.replace(path)
    for other in path.parent.glob(f"{_PREFIX}*"):
        if other != path:
            other.unlink(missing_ok=True)


@contextmanager
def folder_for_new(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside an archive, and delete the folder afterwards.

    A killed process leaves its folder, with up to 220 MB. So first delete folders that are older than an hour: nobody
    needs one for so long.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{_NEW}*"):
        if left.stat().st_mtime < time.time() - 3600:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_NEW, dir=path.parent) as folder:
        yield Path(folder)
