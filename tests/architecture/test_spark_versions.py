"""One module knows the versions of PySpark, and what is private in PySpark and pandas."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from cairn import spark_versions
from state_backend.values.parse_source import parse_source
from tests.support.layout import REPOSITORY

KNOWS = REPOSITORY / "jobs/cairn/spark_versions.py"
PUBLIC = {
    *(
        "pyspark",
        "pyspark.errors",
        "pyspark.sql",
        "pyspark.sql.datasource",
        "pyspark.sql.functions",
        "pyspark.sql.types",
    ),
    *("pyspark.sql.streaming", "pyspark.sql.streaming.state", "pyspark.sql.streaming.stateful_processor", "pandas"),
}
# Python's own, what `NamedTuple` makes, and what pyiceberg, Great Expectations and Google's client have.
NOT_THEIRS = {
    *("_asdict", "_exit", "_fields", "_getframe", "_replace", "_shutdown", "_signature_metadata"),
    *("_do_commit", "_requirements", "_updates"),
    *("_execution_engine", "_http", "_run_exitfuncs", "_value_"),
}


@pytest.fixture(scope="module")
def program() -> dict[Path, ast.Module]:
    return {
        path: parse_source(path.read_text())
        for folder in ("state_backend", "jobs", "plugins", "dags")
        for path in (REPOSITORY / folder).rglob("*.py")
        if path != KNOWS
    }


def own_names(trees: Iterator[ast.Module]) -> set[str]:
    """Return each name with an underscore that the program defines itself."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.alias(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def private_uses(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield the name of each private module, underscore attribute or version of PySpark or pandas that the code uses.

    Underscore names in `own` are the program's, so they may be used.
    """
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] in ("pyspark", "pandas"):
                yield from (f"{module}.{n.name}" for n in names if n.name == "__version__" or n.name[0] == "_")
                if module not in PUBLIC:
                    yield module
            case ast.Import(names=names):
                theirs = [n.name for n in names if n.name.split(".")[0] in ("pyspark", "pandas")]
                yield from (name for name in theirs if name not in PUBLIC)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name) if name[0] == "_" and name[:2] != "__":
                continue
            case ast.Attribute(attr="__version__", value=ast.Name(id="pyspark" | "pandas" | "pd")):
                yield "__version__"
            case ast.Attribute(attr="version", value=ast.Name(id="spark" | "session")):
                yield "version of a session"
            case ast.Attribute(attr=name) if name[0] == "_" and name[:2] != "__" and name not in own | NOT_THEIRS:
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                if name[0] == "_" and name[:2] != "__" and name not in own | NOT_THEIRS:
                    yield name


def test_only_spark_versions_module_uses_private_names_of_pyspark_and_pandas(program: dict[Path, ast.Module]) -> None:
    own = own_names(iter(program.values()))
    found = {
        path.relative_to(REPOSITORY).as_posix(): used
        for path, tree in program.items()
        if (used := sorted({*private_uses(tree, own)}))
    }
    assert found == {}
    assert len({*private_uses(parse_source(KNOWS.read_text()), own)}) > 20, "the one module itself is not seen"


def test_versions_are_compared_as_numbers() -> None:
    assert spark_versions.version_of("4.1.1") == (4, 1) < spark_versions.version_of("4.10.0.dev1")
    assert spark_versions.version_of(pyspark.__version__) == spark_versions.VERSION
    assert spark_versions.OLDEST <= spark_versions.VERSION <= spark_versions.NEWEST
    assert all(
        spark_versions.OLDEST < since.version <= spark_versions.NEWEST for since in spark_versions.SINCE.values()
    )


def test_every_feature_in_the_spark_version_table_is_checked_in_code(program: dict[Path, ast.Module]) -> None:
    """Each row that is not a type of columns has a question, and the module has no second one."""
    asked = {
        node.args[0].value
        # The plugins ask `airflow_versions`, and never PySpark.
        for tree in (
            *(program[path] for path in program if "plugins" not in path.parts),
            parse_source(KNOWS.read_text()),
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "has"
        if isinstance(node.args[0], ast.Constant)
    }
    assert asked <= spark_versions.SINCE.keys()
    assert spark_versions.SINCE.keys() - asked == {"time", "geography", "geometry"}
