"""Read the name of a pipeline from the source of its module, without an import.

If a DAG file imported the module, each parse of the DAG file would import PySpark.
"""

from __future__ import annotations

import ast
from importlib.machinery import PathFinder
from pathlib import Path


def pipeline_name_of(pipeline: str, *, otherwise: str | None = None) -> str:
    """Return the `name` of a `Pipeline`.

    Args:
        pipeline: The `Pipeline`, as `module:NAME`.
        otherwise: Name to return if the source does not show it; None raises `ValueError`.

    Raises:
        ValueError: `otherwise` is None, and the module's source can't be read or has no assignment such as
            `NAME = Pipeline(name="clicks", …)`.
    """
    module, _, variable = pipeline.partition(":")
    name = _name_in_source(module, variable) or otherwise
    if name is None:
        raise ValueError(
            f"Cairn can't read the name of pipeline {pipeline!r} from the source of {module!r}. "
            "Give the name to the operator: pipeline_name=…"
        )
    return name


def _name_in_source(module: str, variable: str) -> str | None:
    file = _source_file(module)
    try:
        tree = ast.parse(file.read_text() if file is not None else "")
    except (ValueError, OSError, SyntaxError):
        return None
    for statement in reversed(tree.body):
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call(keywords=keywords)) if target == variable:
                pass
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.Call(keywords=keywords)) if target == variable:
                pass
            case _:
                continue
        for keyword in keywords:
            if (
                keyword.arg == "name"
                and isinstance(keyword.value, ast.Constant)
                and isinstance(keyword.value.value, str)
            ):
                return keyword.value.value
        return None
    return None


def _source_file(module: str) -> Path | None:
    """Return the source file of a module; None if it is not found.

    The search does not use `importlib.util.find_spec`, which imports the packages that contain the module.
    """
    folders = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin is not None else None
