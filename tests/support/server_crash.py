"""The operations of the crash matrix against a server process, request by request: broken once, and broken from there on."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import unquote
from uuid import uuid4

from state_backend.adapters.azure_storage import AzureCloud
from state_backend.adapters.gcs_storage import GcsCloud
from state_backend.adapters.object_store import Cloud, ObjectStore, Patience
from state_backend.adapters.s3_storage import S3Cloud
from state_backend.ports.storage import Storage
from state_backend.values.errors import CairnError
from tests.support import azure_server, gcs_server, s3_server
from tests.support.crash_matrix import (
    HOME,
    NEW,
    OPERATIONS,
    SAVED,
    Operation,
    Seen,
    Surveyor,
    Try,
    check_published,
    check_swept,
)
from tests.support.faulty_proxy import FaultKind, FaultyProxy, Request

KINDS: tuple[FaultKind, ...] = tuple(k for k in get_args(FaultKind) if k not in ("401", "403", "trickled"))
DYING: tuple[FaultKind, ...] = ("reset", "lost")  # before and after the request took effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A kind of storage: its test server, and its adapter."""

    server: Callable[[], AbstractContextManager[FaultyProxy]]
    cloud: Callable[..., Cloud]

    @contextmanager
    def running(self) -> Iterator[FaultyProxy]:
        """Run the server. The first write of a process tests the preconditions of S3's server, by requests that no test shall count or break."""
        with self.server() as server:
            self.open("first").create("a", b"")
            yield server

    def open(self, prefix: str, patience: Patience | None = None) -> ObjectStore:
        return ObjectStore(self.cloud(prefix=prefix, patience=patience))


STORES = {
    "gcs": Store(server=gcs_server.gcs_server, cloud=partial(GcsCloud, gcs_server.BUCKET)),
    "s3": Store(server=s3_server.s3_server, cloud=partial(S3Cloud, s3_server.BUCKET)),
    "azure": Store(server=azure_server.azure_server, cloud=partial(AzureCloud, azure_server.BUCKET)),
}
# Patience for a fault that is over soon, and for one that is not.
HURRY = Patience(deadline_s=20.0, connect_s=1.0, request_s=0.5, first_delay_s=0.01, longest_delay_s=0.05)
# Long enough for an answer of a busy machine: the fault must come first.
GIVING_UP = Patience(deadline_s=4.0, connect_s=1.0, request_s=4.0, first_delay_s=0.02, longest_delay_s=0.05)


class OnServer:
    def __init__(self, store: Store) -> None:
        self.store, self.prefix = store, f"matrix-{uuid4().hex}"

    def folder(self, name: str, patience: Any = None) -> Storage:
        return self.store.open(f"{self.prefix}/{name}", patience=patience)

    def copy(self) -> OnServer:
        twin, here = OnServer(self.store), self.store.open(self.prefix)
        there = self.store.open(twin.prefix)
        for info in here.list(""):
            there.create(info.path, here.read(info.path))
        return twin

    def remove(self) -> None:
        here = self.store.open(self.prefix)
        for info in here.list(""):
            here.delete(info.path, generation=info.generation)

    def asked(self) -> Callable[[Request], bool]:
        """Whether a request is about these folders."""
        return lambda r: self.prefix in unquote(r.target) or self.prefix.encode() in r.body


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One fault: of which kind, at which request of the operation, and whether the server can't be reached from then on."""

    operation: str
    kind: FaultKind
    at: int
    then: Literal["goes on", "is gone"]


@dataclass(slots=True)
class Figures:
    """``requests`` of undisturbed runs; ``faults`` that struck, by what came of them."""

    requests: int = 0
    faults: int = 0
    made_good: int = 0
    old: int = 0
    new: int = 0
    seconds: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.requests} requests; {self.faults} faults in {self.seconds:.0f} s ({self.kinds}): {self.made_good} made good by "
            f"repeats, {self.old} left the old state and {self.new} the new one for the next try, none another"
        )


class Scene:
    """One operation: the folders before it, and what it makes of them undisturbed."""

    def __init__(self, operation: Operation, store: Store, server: FaultyProxy, work: Path) -> None:
        self.operation, self.server, self.work, self.surveyor = operation, server, work, Surveyor(work)
        self.original = OnServer(store)
        operation.setup(self.original, work)
        self.before = self._seen(self.original)
        twin = self.original.copy()
        asked, begin = twin.asked(), len(server.requests)
        operation.run(Try({n: twin.folder(n) for n in (HOME, SAVED, NEW)}, work, "whole"))
        self.requests = [r for r in server.requests[begin:] if asked(r)]
        self.after = self._seen(twin)
        check_swept(twin, operation, self.surveyor, self.after)
        twin.remove()

    def _seen(self, place: OnServer) -> dict[str, Seen]:
        return {name: self.surveyor.see(place.folder(name)) for name in (HOME, SAVED, NEW)}

    def cells(self) -> Iterator[Cell]:
        """Every request under every kind of fault; and every request that may write as the last one that was sent."""
        for at, request in enumerate(self.requests):
            for kind in KINDS:
                yield Cell(operation=self.operation.name, kind=kind, at=at, then="goes on")
            if request.method != "GET":
                for kind in DYING:
                    yield Cell(operation=self.operation.name, kind=kind, at=at, then="is gone")

    def play(self, cell: Cell, figures: Figures) -> None:
        """Asserts what a fault may come to."""
        place, case = self.original.copy(), str(cell)
        asked = place.asked()
        patience = HURRY if cell.then == "goes on" else GIVING_UP
        this = Try({n: place.folder(n, patience) for n in (HOME, SAVED, NEW)}, self.work, "first")
        error: CairnError | None = None
        with ExitStack() as stack:
            planned = stack.enter_context(self.server.broken(cell.kind, skip=cell.at, only=asked))
            if cell.then == "is gone":
                gone = self.server.broken("reset", times=10**9, only=lambda r: planned.struck > 0 and asked(r))
                stack.enter_context(gone)
            try:
                self.operation.run(this)
            except CairnError as caught:
                error = caught
        figures.faults += planned.struck
        figures.kinds[cell.kind] = figures.kinds.get(cell.kind, 0) + planned.struck
        seen = self._seen(place)
        if error is None:
            assert seen == self.after, case
            figures.made_good += planned.struck
        else:
            assert cell.then == "is gone", f"{case}: {error!r}"
            for name, found in seen.items():
                assert found in (self.before[name], self.after[name]), (
                    f"{case}: {name} is neither the old nor the new one"
                )
            moved = seen == self.after
            figures.new, figures.old = figures.new + moved, figures.old + (not moved)
            again = {n: place.folder(n) for n in (HOME, SAVED, NEW)}
            self.operation.run(Try(again, self.work, "again", this.sink, this.prepared))
            assert self._seen(place) == self.after, f"{case}: after the next try"
        check_published(place, this.sink, case)
        check_swept(place, self.operation, self.surveyor, self.after)
        place.remove()
        shutil.rmtree(self.work / "work", ignore_errors=True)  # what the dead left


def play(
    store: Store, server: FaultyProxy, work: Path, *, most_cells: int | None, names: tuple[str, ...], seed: int = 7
) -> Figures:
    """The cells of some operations: all, or so many that a seed picks, half of them with a server that is gone."""
    figures, began_s = Figures(), time.monotonic()
    scenes = [Scene(o, store, server, work) for o in OPERATIONS if o.name in names]
    cells = [(scene, cell) for scene in scenes for cell in scene.cells()]
    figures.requests = sum(len(scene.requests) for scene in scenes)
    if most_cells is not None:
        chance = random.Random(seed)
        gone, once = ([c for c in cells if (c[1].then == "is gone") == last] for last in (True, False))
        half = min(most_cells // 2, len(gone))
        cells = [*chance.sample(gone, half), *chance.sample(once, min(most_cells - half, len(once)))]
    for scene, cell in cells:
        scene.play(cell, figures)
        server.requests.clear()
    figures.seconds = time.monotonic() - began_s
    return figures
