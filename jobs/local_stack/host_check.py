"""Check of the machine, before set-up downloads anything and before the demo starts anything.

    python jobs/local_stack/host_check.py

The program needs no package. `make setup` runs it with the Python that the virtual environment is made from.
"""

from __future__ import annotations

import multiprocessing
import os
import pwd
import sys


def no_semaphores() -> str | None:
    """Return advice for the user if the system lacks POSIX semaphores, which Airflow's executor needs; else None."""
    try:
        multiprocessing.get_context("fork").Semaphore()
    except OSError as error:
        return (
            f"Airflow's LocalExecutor can't run here: it needs semaphores, which need a writable /dev/shm ({error})\n"
            "Mount one: mount -t tmpfs tmpfs /dev/shm\n"
            "In Docker, start the container with: --shm-size=64m"
        )
    return None


def no_user() -> str | None:
    """Return advice for the user if this user id has no name, which PostgreSQL, Airflow and Spark need; else None."""
    uid = os.geteuid()
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return (
            f"the user id {uid} has no entry in /etc/passwd: PostgreSQL and Spark can't run without a user name\n"
            f"As root, add an entry: useradd --uid {uid} cairn\n"
            "In Docker, add that line to the image, or leave out --user"
        )
    return None


def problems() -> list[str]:
    return [problem for problem in (no_user(), no_semaphores()) if problem is not None]


if __name__ == "__main__":
    found = problems()
    if found:
        print("\n".join([*found, "To set up in spite of this: make setup HOST_CHECK=no"]), file=sys.stderr)
    sys.exit(bool(found))
