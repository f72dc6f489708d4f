"""Who makes a file or folder in the temp folder: only what the next task cleans up after a kill, or what *Uninstall* names."""

from __future__ import annotations

import ast
from pathlib import Path

from state_backend.values.parse_source import parse_source
from tests.support.layout import REPOSITORY

MAKERS = {"mkdtemp", "mkstemp", "TemporaryDirectory", "NamedTemporaryFile", "gettempdir"}
# The first one makes the folders that are locked and cleaned up. The others name a folder of their own.
ALLOWED = {
    "state_backend/adapters/work_folders.py": "cairn-work-",
    "state_backend/adapters/rocks.py": "cairn-cache-",
    "plugins/cairn_operators/warm_driver.py": "cairn-warm-",
    "jobs/local_stack/postgres_server.py": "cairn-pg-",
    "plugins/cairn_operators/driver_process.py": "",  # names the temp folder as a working directory
}


def in_temp_folder(source: str) -> bool:
    """Whether a module makes something in the temp folder: without `dir`, which names another place."""
    calls = [node for node in ast.walk(parse_source(source)) if isinstance(node, ast.Call)]
    named = [(getattr(c.func, "attr", getattr(c.func, "id", "")), {k.arg for k in c.keywords}) for c in calls]
    return any(name in MAKERS and "dir" not in keywords for name, keywords in named)


def test_only_known_modules_use_the_temp_folder_and_uninstall_names_what_they_make() -> None:
    folders = ("state_backend", "jobs/cairn", "jobs/local_stack", "plugins")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    found = {str(path.relative_to(REPOSITORY)) for path in files if in_temp_folder(path.read_text())}
    assert found == {*ALLOWED}
    page = Path(REPOSITORY / "docs" / "install.md").read_text()
    assert [name for name in ALLOWED.values() if name and f"`{name}*`" not in page] == []
