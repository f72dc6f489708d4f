"""Find Spark drivers among the processes of this machine."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Self

from local_stack.owned_process import command_line
from state_backend.values.frozen import frozen

# The title of a forked driver (`cairn.driver.driver_host`), or the command line of a driver that a task started.
_FORKED = re.compile(r"cairn-driver of task (?P<task>\d+): \S+ -m cairn\.driver\.driver (?P<command>.+)")
# Finds the interval's start in a driver's command, which contains the request as JSON.
_START = re.compile(r'"start":\s*"(?P<start>[^"]+)"')
_STARTED = re.compile(r"\S+ -m cairn\.driver\.driver (?P<command>.+)")


@frozen
class RunningDriver:
    pid: int
    task: int
    command: str

    def interval_start(self) -> datetime | None:
        """Return the start of the interval that the driver processes; None if the driver has another command."""
        found = _START.search(self.command) if self.command.startswith("interval ") else None
        return found and datetime.fromisoformat(found["start"])

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the driver with this process id; None if the process has ended or is no driver."""
        parent = parent_of(pid)
        return None if parent is None else cls.parse(" ".join(command_line(pid)), pid, parent)

    @classmethod
    def parse(cls, words: str, pid: int, parent: int) -> Self | None:
        """Return the driver with this command line; None if the command line is another program's."""
        if found := _FORKED.fullmatch(words):
            return cls(pid=pid, task=int(found["task"]), command=found["command"])
        if found := _STARTED.fullmatch(words):
            return cls(pid=pid, task=parent, command=found["command"])
        return None


def parent_of(pid: int) -> int | None:
    """Return the process id of a process's parent; None if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None
