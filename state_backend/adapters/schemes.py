"""The kinds of storage, by the scheme of their URLs.

A new kind needs a module with `open_url`, and one item here. DAG files import this module with every parse, so it
imports no adapter.
"""

from __future__ import annotations

from dataclasses import replace

from state_backend.values.errors import UsageError
from state_backend.values.frozen import frozen
from state_backend.values.hide_secrets import hide


@frozen
class Scheme:
    # The adapter's module. It has `open_url(url, *, credentials=None) -> Storage`.
    module: str
    # The form of the URLs, for messages. None if messages do not offer this kind.
    form: str | None
    absolute: bool = False  # True: the rest of a URL is an absolute path
    over_network: bool = False
    # The library that only this kind needs: its top-level module, its name for people, and the extra that installs it.
    # None if no library is needed.
    needs: tuple[str, str, str] | None = None


_AZURE = Scheme(
    module="state_backend.adapters.azure_storage",
    form="az://container/prefix",
    over_network=True,
    needs=("azure", "Microsoft's clients", "azure"),
)
SCHEMES = {
    "file": Scheme(
        module="state_backend.adapters.local_storage",
        form="file:///absolute/path, /absolute/path",
        absolute=True,
    ),
    "gs": Scheme(
        module="state_backend.adapters.gcs_storage",
        form="gs://bucket/prefix",
        over_network=True,
        needs=("google", "Google's client", "gcs"),
    ),
    "s3": Scheme(
        module="state_backend.adapters.s3_storage",
        form="s3://bucket/prefix",
        over_network=True,
        needs=("boto3", "Amazon's SDK", "s3"),
    ),
    "az": _AZURE,
    "abfss": replace(_AZURE, form="abfss://container@account.dfs.core.windows.net/prefix"),
    "memory": Scheme(module="state_backend.adapters.memory_storage", form=None),
}
ACCEPTED = " or ".join(scheme.form for scheme in SCHEMES.values() if scheme.form is not None)


def scheme_of(url: str) -> Scheme | None:
    name, separator, rest = url.partition("://")
    if not separator:
        return SCHEMES["file"] if url.startswith("/") else None
    scheme = SCHEMES.get(name)
    return scheme if scheme is not None and rest and rest.startswith("/") == scheme.absolute else None


def check_url(url: str) -> Scheme:
    if hide(url) != url:
        raise UsageError(
            f"the storage URL {hide(url)!r} contains credentials, which messages, commands and records would show\n"
            "Leave them out of the URL. docs/storage.md says how Cairn logs in to each kind of storage"
        )
    scheme = scheme_of(url)
    if scheme is None:
        unset = "; is the variable unset that should hold it?" if not url else ""
        raise UsageError(f"not a storage URL: {url!r}{unset}; expected {ACCEPTED}")
    return scheme


def is_over_network(url: str) -> bool:
    """Return True if each request to the storage of a URL takes a network round trip."""
    scheme = scheme_of(url)
    return scheme is not None and scheme.over_network
