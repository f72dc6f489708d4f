"""The location of a pipeline: the root, the pipeline's name, and the storage of its folder."""

from __future__ import annotations

from state_backend.adapters.open_storage import join_url, open_storage
from state_backend.formats import paths
from state_backend.ports.storage import Storage
from state_backend.values.frozen import frozen


@frozen
class Location:
    """The folder of a pipeline below a root. Each operation makes one `Location`, and passes it on."""

    root: str
    pipeline: str
    storage: Storage

    def __post_init__(self) -> None:
        # Every writer has a location, so this check stops invalid names, whose records could not be read back.
        paths.check_name(self.pipeline)

    @property
    def url(self) -> str:
        return join_url(self.root, self.pipeline)


def locate(root: str, pipeline: str) -> Location:
    return Location(root=root, pipeline=pipeline, storage=open_storage(join_url(root, pipeline)))
