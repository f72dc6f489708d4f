"""Plants faults into the program by seed, to count how many the tests find.

    python -m tests.tools.plant --seed 1 --count 60                      # draw a sample, and print it as JSON
    python -m tests.tools.plant --sample tests/tools/sample.json         # where its faults stand in today's code
    python -m tests.tools.plant --sample FILE --plant 7                  # edit the tree; --undo gives the file back
    python -m tests.tools.plant --sample FILE --measure FOLDER           # which faults `make test` finds (see `measure`)

Each room (a folder of the program) gets an equal share; the operators take turns. A fault changes one statement of a function. Texts for people,
docstrings, annotations and values of modules and classes stay as they are. A fault is known by file, function and statement, so it is found again
after its function moved. If its statement vanished, a fault of the same room takes its place.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from state_backend.values.parse_source import parse_source

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ("state_backend", "jobs", "plugins", "dags")
PLANTED = Path(".cache/planted.json")

FLIPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
FLIPPED |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
COMPARES = re.compile(rb"[<>]=?|[=!]=|\bis\s+not\b|\bis\b|\bnot\s+in\b|\bin\b")
# Calls and arguments that speak to people, or only to type checkers.
SAYS = re.compile(
    r"\b(_?log(ger)?\.\w+|warnings?\.warn|print|s?echo|say|write_line|add_note|cast|TypeVar|Option|Argument)$"
)
SAID = {"help", "message", "description", "title", "metavar", "text", "label", "msg", "annotation", "returns"}
# A swap of their arguments changes nothing, or fails at once.
NOT_SWAPPED = {"min", "max", "isinstance", "issubclass", "getattr", "hasattr"}
LOCK = re.compile(r"(?<![a-z])(r?lock|flock|mutex|semaphore|acquire)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A changed statement, the `nth` of equal ones in its function. Of a compound statement `old` is the head, without its colon."""

    operator: str
    path: str
    function: str
    old: str
    new: str
    nth: int = 0

    @property
    def room(self) -> str:
        return self.path.rpartition("/")[0]


@dataclass(slots=True)
class Statement:
    """A statement of a function, or the head of a compound one. Another statement may stand before `line`, the line of an `if` for its `elif`."""

    path: str
    function: str
    node: ast.stmt
    start: int
    end: int
    line: int
    handles: bool
    text: str
    nth: int = 0

    def fault(self, operator: str, new: str) -> Fault:
        return Fault(operator=operator, path=self.path, function=self.function, old=self.text, new=new, nth=self.nth)


class Source:
    """A file in bytes, as `ast` counts columns."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def statements(self) -> list[Statement]:
        seen: Counter[tuple[str, str]] = Counter()
        found = list(self._statements(parse_source(self.source), "", False, False))
        for one in found:
            one.nth = seen[one.function, same(one.text)]
            seen[one.function, same(one.text)] += 1
        return found

    def _statements(self, node: ast.AST, name: str, runs: bool, handles: bool, line: int = 0) -> Iterator[Statement]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".lstrip(".")
                if child.name != "__repr__":
                    yield from self._statements(child, inner, not isinstance(child, ast.ClassDef), False)
            elif not isinstance(child, ast.stmt):
                yield from self._statements(child, name, runs, handles or isinstance(child, ast.ExceptHandler))
            elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
                start, end = self.span(child)
                first = (line or getattr(node, "lineno", 0)) if self.source.startswith(b"elif", start) else 0
                if runs and not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                    if (head := _head(child)) is not None:
                        end = self.source.index(b":", self.span(head)[1])
                    text = self.source[start:end].decode()
                    yield Statement(self.path, name, child, start, end, first or child.lineno, handles, text)
                yield from self._statements(child, name, runs, handles, first)

    def faults(self) -> Iterator[Fault]:
        """Yield all faults that can be planted into the file."""
        for one in self.statements():
            if not isinstance(one.node, ast.Try | ast.TryStar | ast.Import | ast.ImportFrom):
                for new, operator in {new: operator for operator, new in self._edits(one)}.items():
                    yield one.fault(operator, new)

    def _edits(self, one: Statement) -> Iterator[tuple[str, str]]:
        """Yield operators, and what each makes of the statement."""
        node = one.node
        if operator := _removes(one):
            yield operator, "pass"
        if isinstance(node, ast.With | ast.AsyncWith):
            items = [ast.unparse(item) for item in node.items]
            if lock := next((item for item in items if LOCK.search(item) and " as " not in item), None):
                items.remove(lock)
                yield "removed lock", f"with {', '.join(items)}" if items else "if True"
        if not isinstance(node, ast.Raise) and not _says(node):
            for expression, parent in _expressions(node):
                for operator, start, end, new in self._changes(expression, parent):
                    yield operator, (self.source[one.start : start] + new + self.source[end : one.end]).decode()

    def _changes(self, node: ast.expr, parent: ast.AST) -> Iterator[tuple[str, int, int, bytes]]:
        """Yield operator, start, end and new text of each change of an expression."""
        start, end = self.span(node)
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                if sign := COMPARES.search(self.source, self.span(left)[1], self.span(right)[0]):
                    yield "flipped comparison", *sign.span(), FLIPPED[" ".join(sign[0].decode().split())].encode()
        elif isinstance(node, ast.Await):
            yield "removed await", start, self.span(node.value)[0], b""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] not in NOT_SWAPPED:
            for one, two in zip(node.args, node.args[1:], strict=False):
                kinds = {ast.Constant: 1, ast.Starred: 2}
                kind, other = (kinds.get(type(argument), 0) for argument in (one, two))
                if kind == other < 2 and ast.dump(one) != ast.dump(two):
                    (a, b), (c, d) = self.span(one), self.span(two)
                    yield "swapped arguments", a, d, self.source[c:d] + self.source[b:c] + self.source[a:b]
        elif isinstance(node, ast.Constant):
            value, in_call = node.value, isinstance(parent, ast.Call) and ast.unparse(parent.func) == "range"
            counts = in_call or isinstance(parent, ast.Subscript | ast.Slice | ast.Compare)
            if isinstance(value, bool):
                yield "changed constant", start, end, str(not value).encode()
            elif isinstance(value, int) and counts:
                yield "off by one", start, end, str(value + 1).encode()
            elif value == 1 and isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add | ast.Sub):
                yield "off by one", start, end, b"0"
            elif isinstance(value, int | float):
                yield "changed constant", start, end, str(value * 2 if value > 1 else 1 - value).encode()
            elif isinstance(value, str) and value.isidentifier() and isinstance(parent, ast.Compare | ast.Subscript):
                yield "changed constant", start, end, f'"{value}_"'.encode()


def _head(node: ast.stmt) -> ast.expr | None:
    """Return the last expression before the colon of a compound statement."""
    if isinstance(node, ast.With | ast.AsyncWith):
        return node.items[-1].optional_vars or node.items[-1].context_expr
    if isinstance(node, ast.For | ast.AsyncFor):
        return node.iter
    return node.test if isinstance(node, ast.If | ast.While) else node.subject if isinstance(node, ast.Match) else None


def _removes(one: Statement) -> str | None:
    """Return the operator that removes the statement; None if it stays."""
    node = one.node
    if isinstance(node, ast.Raise):
        return "swallowed exception" if one.handles else "removed statement"
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    if isinstance(target, ast.Attribute | ast.Subscript) and not one.function.endswith("__init__"):
        return "removed statement"
    if not isinstance(node, ast.Expr) or _says(node):
        return "removed statement" if isinstance(node, ast.AugAssign | ast.Delete | ast.Continue) else None
    call = node.value.value if isinstance(node.value, ast.Await) else node.value
    name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
    if name.endswith("fsync"):
        return "removed fsync"
    if call is not node.value or name in {"join", "wait", "result"}:
        return "removed await"
    return "removed lock" if LOCK.search(name) else "removed statement" if name else None


def _says(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and SAYS.search(ast.unparse(call.func)) is not None


def _expressions(node: ast.AST) -> Iterator[tuple[ast.expr, ast.AST]]:
    """Yield the expressions of a statement, each with what holds it; without inner statements, and without what people read."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            said = {name, getattr(child, "arg", None)} & SAID or isinstance(child, ast.JoinedStr) or _says(child)
            inner = isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case | ast.arguments)
            if isinstance(child, ast.AST) and not inner and not said:
                if isinstance(child, ast.expr):
                    yield child, node
                yield from _expressions(child)


def same(text: str) -> str:
    """Return a text as it is compared: the layout of lines does not count."""
    return re.sub(r",([)\]}])", r"\1", re.sub(r"\s+", "", text))


def program(root: Path) -> list[Source]:
    files = (file for folder in PROGRAM for file in sorted((root / folder).rglob("*.py")) if file.name != "_version.py")
    return [Source(file.relative_to(root).as_posix(), file.read_bytes()) for file in files]


def draw(faults: Collection[Fault], seed: int, count: int) -> list[Fault]:
    """Draw faults of different statements by chance: the rooms take turns, and so do the operators."""
    chance, used, drawn = random.Random(seed), Counter[str](), list[Fault]()
    rooms: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        rooms[fault.room].append(fault)
    order = sorted(rooms)
    chance.shuffle(order)
    while len(drawn) < count and (order := [room for room in order if rooms[room]]):
        for room in order[: count - len(drawn)]:
            least = min(used[fault.operator] for fault in rooms[room])
            operator = chance.choice(sorted({fault.operator for fault in rooms[room] if used[fault.operator] == least}))
            drawn.append(chance.choice([fault for fault in rooms[room] if fault.operator == operator]))
            used[operator] += 1
            rooms[room] = [fault for fault in rooms[room] if _place(fault) != _place(drawn[-1])]
    return drawn


def _place(fault: Fault) -> tuple[str, str, str]:
    return fault.path, fault.function, same(fault.old)


def find(fault: Fault, statements: Collection[Statement]) -> Statement | None:
    """Return where the fault's statement stands: in its function, else in the only function of that name, else the only long statement like it."""
    name, text = fault.function.rpartition(".")[2], same(fault.old)
    equal = [one for one in statements if same(one.text) == text]
    named = [one for one in equal if one.function.rpartition(".")[2] == name]
    there = [one for one in named if (one.path, one.function) == (fault.path, fault.function)]
    for found in (there, named, equal if len(text) > 30 else []):
        for exact in (found, [one for one in found if one.nth == fault.nth]):
            if len(exact) == 1:
                return exact[0]
    return None


def replant(sample: Sequence[Fault], sources: Sequence[Source], seed: int) -> list[Fault]:
    """Return the sample in today's code. For a fault that vanished, draw one of its room, or of the folder above, and say so."""
    statements = [one for source in sources for one in source.statements()]
    found = [find(fault, statements) for fault in sample]
    now = [one and one.fault(fault.operator, fault.new) for fault, one in zip(sample, found, strict=True)]
    every = [] if all(now) else [fault for source in sources for fault in source.faults()]
    for n, fault in enumerate(sample):
        if now[n] is None:
            taken, room = {_place(one) for one in now if one}, f"{fault.room}/"
            free = [one for one in every if _place(one) not in taken]
            while not (near := [one for one in free if f"{one.room}/".startswith(room)]):
                room = room[: room.rstrip("/").rfind("/") + 1]
            now[n] = draw([one for one in near if one.operator == fault.operator] or near, seed + n + 1, 1)[0]
            print(f"vanished: {fault}\n    in its place: {now[n]}", file=sys.stderr)
    return now


def plant(fault: Fault, root: Path = ROOT) -> None:
    """Edit the tree. `undo` gives the file back."""
    source = Source(fault.path, (root / fault.path).read_bytes())
    one = find(fault, source.statements())
    assert one is not None, fault
    edit({fault.path: source.source[: one.start] + fault.new.encode() + source.source[one.end :]}, root)


def edit(files: dict[str, bytes], root: Path = ROOT) -> None:
    kept = root / PLANTED
    if kept.exists():
        raise SystemExit("faults are planted already; first: python -m tests.tools.plant --undo")
    for path, changed in files.items():
        compile(changed, path, "exec")
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps({path: (root / path).read_text() for path in files}))
    for path, changed in files.items():
        (root / path).write_bytes(changed)


def undo(root: Path = ROOT) -> None:
    """Give the files back as they were."""
    kept = root / PLANTED
    for path, source in json.loads(kept.read_text() if kept.exists() else "{}").items():
        (root / path).write_text(source)
    kept.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.plant", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--sample", type=Path, help="a file with a sample, instead of a new one")
    parser.add_argument("--plant", type=int, metavar="K", help="edit the tree: the sample's fault K, from 0")
    parser.add_argument("--undo", action="store_true", help="give back the file that --plant changed")
    parser.add_argument(
        "--measure", type=Path, metavar="FOLDER", help="run tests with each fault; FOLDER keeps results"
    )
    given = parser.parse_args()
    if given.undo:
        return undo()
    sources = program(ROOT)
    if given.sample:
        sample = replant([Fault(**one) for one in json.loads(given.sample.read_text())], sources, given.seed)
    else:
        sample = draw([fault for source in sources for fault in source.faults()], given.seed, given.count)
    if given.measure:
        from tests.tools.measure import measure

        measure(sample, given.measure)
    elif given.plant is not None:
        plant(sample[given.plant])
    else:
        print(json.dumps([asdict(fault) for fault in sample], indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
