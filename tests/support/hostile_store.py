"""Opens files that somebody else wrote in RocksDB, in a process that may crash or hang."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from state_backend.adapters.memory_storage import MemoryStorage
from state_backend.adapters.rocks import EngineOptions
from state_backend.shard.restore import restore_shard
from state_backend.values.errors import CairnError
from state_backend.values.records import ShardManifest

LIMIT_S = 30.0


class Opener:
    """Context manager: a process that opens one store after the other."""

    def __init__(self) -> None:
        self._process: Any = None

    def __enter__(self) -> Opener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, manifest: ShardManifest) -> int | str:
        """Return the number of entries, or the text of the error of Cairn.

        Raises:
            AssertionError: The process crashed, hangs, or raised an error of another kind.
        """
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._here, there = context.Pipe()
            self._process = context.Process(target=_serve, args=(there,), daemon=True)
            self._process.start()
            there.close()
        try:
            self._here.send(manifest)
            answered = self._here.poll(LIMIT_S)
            answer = self._here.recv() if answered else f"no answer within {LIMIT_S:.0f} s"
        except (EOFError, OSError):
            self._process.join(LIMIT_S)
            answered, answer = False, f"exit code {self._process.exitcode}"
        if not answered:
            self.close()
        assert answered and not isinstance(answer, BaseException), answer
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(there: Connection) -> None:
    with suppress(EOFError):
        while True:
            there.send(_open(there.recv()))


def _open(manifest: ShardManifest) -> int | str | BaseException:
    with TemporaryDirectory() as folder:
        try:
            restored = restore_shard(
                manifest.key_groups, [manifest], MemoryStorage(), Path(folder, "db"), EngineOptions()
            )
            with restored.store as store:
                return sum(1 for _ in store.scan(b"", None))
        except CairnError as error:
            return f"{type(error).__name__}: {error}"
        except BaseException as error:
            return AssertionError(repr(error))
