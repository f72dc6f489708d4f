"""Count the files that a value enters on its way through the program, and its climbs.

    python -m tests.tools.trips MODULE:FUNCTION:PARAMETER …
    python -m tests.tools.trips

A value enters a file if a function there receives it from a function of another file: as an argument, inside a tuple,
list or dict, as `**how`, or as a field of an object that is built from it. The script follows calls in the order of the
source. A climb is a step from a package to one that stands higher in `ROOMS`. The script reads the source as text and
names calls by imports and annotations, so it misses calls of objects that these do not show.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"state_backend": "state_backend", "cairn": "jobs/cairn", "cairn_operators": "plugins/cairn_operators"}
# The packages, from the lowest to the highest.
ROOMS = (
    *(f"state_backend.{room}" for room in ("values", "formats", "ports", "adapters", "state", "shard", "checkpoint")),
    *("state_backend.inspection", "cairn", "cairn.processors", "cairn.rows", "cairn.shipping", "cairn.spark"),
    *("cairn.runners", "cairn.shard_jobs", "cairn.data_sources", "cairn.operations", "cairn.replay", "cairn.trials"),
    *("cairn.driver", "cairn.command", "cairn_operators"),
)
# The values whose trips the project keeps count of.
STARTS = (
    "cairn.operations.intervals.run_interval:run_interval:root",
    "cairn.operations.intervals.process_interval:process_interval:attempt",
)


@dataclass(slots=True)
class Module:
    """A parsed module: its functions and classes by name, and what its imports name."""

    name: str
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)


@cache
def modules() -> dict[str, Module]:
    """Return all modules of the program, by dotted name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            found[name] = _module(name, ast.parse(path.read_text()))
    return found


def _module(name: str, tree: ast.Module) -> Module:
    module = Module(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module.imported |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            module.functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            module.classes[node.name] = node
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    module.functions[f"{node.name}.{inner.name}"] = inner
    return module


def stays_of(start: str) -> list[str]:
    """Follow a parameter, given as module:function:parameter. Return the modules that the value enters, in order."""
    name, function, parameter = start.split(":")
    stays, seen = [name], set()

    def follow(at: tuple[str, str, str]) -> None:
        if at in seen:
            return
        seen.add(at)
        for into in _passed_on(*at):
            if into not in seen:
                if stays[-1] != into[0]:
                    stays.append(into[0])
                follow(into)

    follow((name, function, parameter))
    return stays


def _floor(module: str) -> int:
    return max((n for n, room in enumerate(ROOMS) if f"{module}.".startswith(f"{room}.")), default=-1)


def _passed_on(name: str, function: str, parameter: str) -> Iterator[tuple[str, str, str]]:
    """Yield the functions that a function calls with the value, and the parameter that gets it."""
    module = modules()[name]
    owner = function.rpartition(".")[0]
    body = module.functions.get(function)
    if body is None:
        return
    carriers, types = {parameter}, _types(body, module, owner)
    for node in ast.walk(body):
        if isinstance(node, ast.Assign) and _carries(node.value, carriers, module):
            carriers |= {ast.unparse(target) for target in node.targets}
    for attribute in [one for one in carriers if one.startswith("self.") and owner]:
        yield from ((name, other, attribute) for other in module.functions if other.startswith(f"{owner}."))
    for node in ast.walk(body):
        if isinstance(node, ast.Call):
            yield from _bound(node, carriers, module, owner, types)


def _types(body: ast.FunctionDef | ast.AsyncFunctionDef, module: Module, owner: str) -> dict[str, str]:
    """Return the class of each variable of a function, as far as annotations and constructors show it."""
    arguments = body.args
    found = {
        one.arg: ast.unparse(one.annotation).strip("'\"").partition(" |")[0]
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        if one.annotation is not None
    }
    for node in ast.walk(body):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            callee = _resolved(node.value.func, module, owner, found)
            if callee is None:
                continue
            there = modules()[callee[0]]
            returned = there.functions[callee[1]].returns if callee[1] in there.functions else None
            kind = callee[1] if callee[1] in there.classes else ast.unparse(returned) if returned is not None else ""
            for target in node.targets:
                found[ast.unparse(target)] = kind
    return found


def _carries(node: ast.expr, carriers: set[str], module: Module) -> bool:
    """Return True for the value, a field of the value, and a display or an object that is built from it."""
    match node:
        case ast.Name():
            return node.id in carriers
        case ast.Attribute():
            return ast.unparse(node) in carriers or _carries(node.value, carriers - {"self"}, module)
        case ast.Tuple() | ast.List() | ast.Set():
            return any(_carries(one, carriers, module) for one in node.elts)
        case ast.Dict():
            return any(_carries(one, carriers, module) for one in node.values)
        case ast.Starred():
            return _carries(node.value, carriers, module)
        case ast.Call():
            built = _resolved(node.func, module, "", {})
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            makes = ast.unparse(node.func) in ("partial", "replace")
            makes |= built is not None and built[1] in modules()[built[0]].classes
            return makes and any(_carries(one, carriers, module) for one in arguments)
    return False


def _bound(
    call: ast.Call, carriers: set[str], module: Module, owner: str, types: dict[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield module, function and parameter for each argument of a call that carries the value."""
    target, arguments = call.func, call.args
    if ast.unparse(target) == "partial" and arguments:
        target, *arguments = arguments
    callee = _resolved(target, module, owner, types)
    if callee is None:
        return
    name, function = callee
    there = modules()[name]
    if function in there.classes and f"{function}.__init__" not in there.functions:
        # The constructor of a dataclass: its methods get the fields.
        methods = [one for one in there.functions if one.startswith(f"{function}.")]
        given = [keyword.arg for keyword in call.keywords if _carries(keyword.value, carriers, module)]
        yield from ((name, method, f"self.{one}") for one in given for method in methods)
        return
    function = f"{function}.__init__" if function in there.classes else function
    names = _parameters(there.functions[function])
    if "." in function and names[:1] in (["self"], ["cls"]):
        if isinstance(target, ast.Attribute) and _carries(target.value, carriers - {"self"}, module):
            yield name, function, "self"
        names = names[1:]
    for argument, one in zip(arguments, names, strict=False):
        if _carries(argument, carriers, module):
            yield name, function, one
    for keyword in call.keywords:
        if _carries(keyword.value, carriers, module):
            yield from ((name, function, one) for one in ([keyword.arg] if keyword.arg else names))


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _resolved(target: ast.expr, module: Module, owner: str, types: dict[str, str]) -> tuple[str, str] | None:
    """Return module and name of a called function, method or class; None if names and annotations do not show it."""
    text = ast.unparse(target)
    if text.startswith("self.") and owner and f"{owner}.{text[5:]}" in module.functions:
        return module.name, f"{owner}.{text[5:]}"
    if isinstance(target, ast.Attribute) and (kind := types.get(ast.unparse(target.value))):
        text = f"{kind}.{target.attr}"
    if text in module.functions or text in module.classes:
        return module.name, text
    head, _, rest = text.partition(".")
    path = module.imported.get(head, "")
    for _ in range(3):  # A package may import the name from one of its modules.
        where, _, name = path.rpartition(".")
        if path in modules():
            where, name = path, ""
        there = modules().get(where)
        if there is None:
            return None
        found = ".".join(filter(None, (name, rest)))
        if found in there.functions or found in there.classes:
            return where, found
        path = there.imported.get(name, "")
    return None


def main(starts: list[str]) -> None:
    """Print the figures of each value."""
    for start in starts or STARTS:
        stays = stays_of(start)
        climbs = sum(_floor(before) < _floor(after) for before, after in pairwise(stays))
        print(f"{start}: {len({*stays})} files, {climbs} climbs")
        for name in sorted({*stays}) if starts else ():
            print(f"  {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
