"""The release of this code, and the error for files that another release wrote in another format."""

from __future__ import annotations

import re
from importlib import import_module

from state_backend.values.errors import UnsupportedFormat


def _version() -> str:
    try:
        found: str = import_module("state_backend.values._version").version
    except (ModuleNotFoundError, SyntaxError, AttributeError):  # A stopped build leaves an incomplete file.
        return "0.1.dev0"
    return found


# The release of this code. The build writes it into `_version.py`, from the newest git tag. Without this file, as in
# sources that were never built, it is "0.1.dev0". Cairn writes `RELEASE` into every JSON file below a root, so that a
# reader knows which release wrote the file.
RELEASE = _version()
WHEEL = f"cairn_state-{RELEASE}-py3-none-any.whl"


def unsupported(where: str, wrote: str, reads: str, release: str | None = None) -> UnsupportedFormat:
    """Return the error for the file `where`, whose format this release can't read. `release`: its writer, if known."""
    who = f"Cairn {release[:40]}" if release is not None else "another release of Cairn"
    text = f"{where}: {who} wrote {wrote}; this is Cairn {RELEASE}, which reads {reads}\n"
    if release is None:
        return UnsupportedFormat(
            f"{text}Leave the file as it is. Use the release of Cairn that wrote it, or a newer one"
        )
    if is_newer(release):
        return UnsupportedFormat(f"{text}Leave the file as it is. Use Cairn {release[:40]} or a newer release")
    return UnsupportedFormat(
        f"{text}Leave the file as it is. Use the build of Cairn that wrote it, or a newer one. If only this build ever wrote "
        "here, the file is damaged"
    )


def is_newer(release: str) -> bool:
    """Return True if `release` is newer than this release, or can't be compared with it."""
    try:
        return _numbers(release) > _numbers(RELEASE)
    except ValueError:
        return True


def _numbers(release: str) -> tuple[int, ...]:
    # `0.2.dev31` counts as 0.2: the 31st commit on the way to 0.2.
    found = re.match(r"\d+(\.\d+)*", release)
    if found is None:
        raise ValueError(f"{release!r} is no release")
    return tuple(int(part) for part in found[0].split("."))
