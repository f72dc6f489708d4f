"""Only a storage's adapter and its registration know the scheme of its URLs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from state_backend.adapters.schemes import SCHEMES
from state_backend.values.parse_source import parse_source
from tests.support.layout import REPOSITORY

KNOWING = {
    REPOSITORY / f"{module.replace('.', '/')}.py"
    for module in ("state_backend.adapters.schemes", *(scheme.module for scheme in SCHEMES.values()))
}
# A local path and a `file:` URL are two forms of one root: other code may convert them.
SCHEME_TEXTS = tuple(f"{name}://" for name in SCHEMES if name not in ("file", "memory"))
FOLDERS = ("jobs/cairn", "state_backend", "plugins")
MODULES = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py") if path not in KNOWING]
# Texts for people: an example of a call in an error message.
EXAMPLES = {'savepoint={"folder": "gs://bucket/savepoints"}'}


def scheme_literals(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string with a scheme, except docstrings."""
    tree = parse_source(source)
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        if any(text in node.value for text in SCHEME_TEXTS):
            yield node.lineno, node.value


@pytest.mark.parametrize("folder", FOLDERS)
def test_only_storage_adapters_contain_url_schemes(folder: str) -> None:
    modules = [path for path in MODULES if path.is_relative_to(REPOSITORY / folder)]
    assert modules
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {text}"
        for path in modules
        for line, text in scheme_literals(path.read_text())
        if not any(example in text for example in EXAMPLES)
    ]
    assert not found, "move the scheme to state_backend/adapters/schemes.py"


def test_an_adapter_uses_its_own_scheme_only() -> None:
    for scheme in SCHEMES.values():
        path: Path = REPOSITORY / f"{scheme.module.replace('.', '/')}.py"
        own = {f"{name}://" for name, other in SCHEMES.items() if other.module == scheme.module}
        others = [text for text in SCHEME_TEXTS if text not in own]
        assert not [text for _, text in scheme_literals(path.read_text()) if any(other in text for other in others)]


def test_url_schemes_are_found_in_code_but_not_in_docstrings() -> None:
    source = '"""gs://docstring"""\nif root.startswith("gs://"):\n    url = f"s3://{bucket}"\n'
    assert list(scheme_literals(source)) == [(2, "gs://"), (3, "s3://")]
