"""Compute a hash of a value that is equal in every process, for a processor's arguments and for code without a file.

Equal values have equal hashes under every PYTHONHASHSEED. Classes and functions with a file are hashed by name, because
`ship_processor` hashes the file's bytes. Other classes and functions (in a notebook, or made within a function) are
hashed by source text, closures and members; without a source, by byte code, which differs between versions of Python.
Other objects are hashed by class and state, as pickle would send them. An object that can't be pickled is refused.
"""

from __future__ import annotations
import __future__

import ast
import copyreg
import dis
import functools
import hashlib
import linecache
import math
import struct
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import numpy as np
import pandas as pd
from pyspark import Accumulator

from cairn.spark_versions import Broadcast
from state_backend.formats.types import shorten
from state_backend.values.errors import UsageError
from state_backend.values.parse_source import parse_source

# The compiler flags of imports from `__future__`.
_FUTURE = sum(
    getattr(__future__, name).compiler_flag
    for name in {*__future__.all_feature_names} - {"nested_scopes", "generators"}
)
# Members of a class that Python adds, or that do not affect the behaviour of the class.
_MADE = {"__dict__", "__weakref__", "__module__", "__doc__", "__abstractmethods__", "_abc_impl", "__qualname__"}
_MADE |= {"__firstlineno__", "__static_attributes__"}  # Since Python 3.13.
# Modules of PySpark whose objects are plain values. Other PySpark objects stand for objects in a JVM or on a server.
_PYSPARK_VALUES = ("pyspark.sql.types", "pyspark.sql.streaming", "pyspark.storagelevel", "pyspark.accumulators")


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def _float(value: float) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack(">d", value)


_PLAIN: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"",
    type(...): lambda value: b"",
    type(NotImplemented): lambda value: b"",
    bool: lambda value: b"1" if value else b"0",
    int: lambda value: str(value).encode() if abs(value) < 1 << 4096 else hex(value).encode(),
    float: _float,
    complex: lambda value: _float(value.real) + _float(value.imag),
    str: _text,
    bytes: bytes,
    bytearray: bytes,
}


class ValueHasher:
    def __init__(self) -> None:
        self.modules: set[str] = set()  # The modules of all classes and functions that were hashed.
        self.by_build: set[str] = set()  # Functions whose hash differs between versions of Python.
        # By `id`, the depth of each value that is being hashed. If a value contains itself, `digest` meets the value
        # again while it is in `_open`, and hashes its depth instead of its content.
        self._open: dict[int, int] = {}
        self._done: dict[int, bytes] = {}  # By `id`, the hash of each finished value.
        self._kept: list[Any] = []  # Keeps the finished values alive, so that no new value gets their `id`.

    def digest(self, value: Any, path: str) -> bytes:
        if plain := _PLAIN.get(type(value)):
            return _hash(type(value).__name__, plain(value))
        if done := self._done.get(id(value)):
            return done
        if (depth := self._open.get(id(value))) is not None:
            return _hash("cycle", str(depth).encode())
        self._open[id(value)] = len(self._open)
        try:
            digest = self._composite(value, path)
        except RecursionError:
            where = f"{path[:60]}…" if len(path) > 60 else path
            raise UsageError(
                f"{where}, a {_type_name(value)}, is nested too deeply; give the processor a flatter value"
            ) from None
        finally:
            del self._open[id(value)]
        self._done[id(value)] = digest
        self._kept.append(value)
        return digest

    def _composite(self, value: Any, path: str) -> bytes:
        kind = type(value)
        if kind in (list, tuple):
            return _hash(kind.__name__, *self._items(value, path))
        if kind in (set, frozenset):
            return _hash(kind.__name__, *sorted(self.digest(item, f"an item of {path}") for item in value))
        if kind is dict or kind is types.MappingProxyType:
            return _hash("dict", *self._entries(value, path))
        if isinstance(value, type):
            return self._class(value, path)
        if isinstance(value, types.FunctionType):
            return self._function(value, path)
        if isinstance(value, types.ModuleType):
            self.modules.add(value.__name__)
            return _hash("module", _text(value.__name__))
        if isinstance(value, types.CodeType):
            return self._code(value, path)
        if isinstance(value, types.CellType):
            return self._cell(value, path)
        if isinstance(value, functools.partial):
            parts = self.digest(value.func, f"{path}.func"), self._sequence(value.args, f"{path}.args")
            return _hash("partial", *parts, *self._entries(value.keywords, f"{path}.keywords"))
        if isinstance(value, staticmethod | classmethod):
            return _hash(kind.__name__, self.digest(value.__func__, path))
        if isinstance(value, property):
            return _hash("property", *(self.digest(f, path) for f in (value.fget, value.fset, value.fdel)))
        if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType | types.WrapperDescriptorType):
            return _hash("descriptor", _text(value.__qualname__))
        if isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, types.ModuleType | None):
            return _hash("method", self.digest(value.__self__, f"{path}.__self__"), _text(value.__name__))
        return self._known_object(value, path) or self._object(value, path)

    def _items(self, items: Iterable[Any], path: str) -> list[bytes]:
        return [self.digest(item, f"{path}[{n}]") for n, item in enumerate(items)]

    def _sequence(self, items: Iterable[Any], path: str) -> bytes:
        return _hash("items", *self._items(items, path))

    def _entries(self, entries: Mapping[Any, Any], path: str) -> list[bytes]:
        pairs = (
            self.digest(key, f"a key of {path}") + self.digest(item, f"{path}[{_repr(key)}]")
            for key, item in entries.items()
        )
        # Equal dicts may have their entries in different orders, so the hashes are sorted.
        return sorted(pairs)

    def _class(self, cls: type, path: str) -> bytes:
        self.modules.add(cls.__module__)
        name = _text(f"{cls.__module__}:{cls.__qualname__}")
        if _has_file(cls.__module__) and _resolve(cls) is cls:
            return _hash("class", name)
        digests = [self.digest(base, f"a base of {path}") for base in (type(cls), *cls.__bases__)]
        for member in sorted(vars(cls).keys() - _MADE):
            digests += [_hash("name", _text(member)), self.digest(vars(cls)[member], f"{_code_name(cls)}.{member}")]
        return _hash("class", name, *digests)

    def _function(self, function: types.FunctionType, path: str) -> bytes:
        module = function.__module__ or ""
        self.modules.add(module)
        name = _text(f"{module}:{function.__qualname__}")
        filed = _has_file(module)
        if filed and _resolve(function) is function:
            return _hash("function", name)
        code, where = function.__code__, _code_name(function)
        self.modules.update(i.argval for i in _instructions(code) if i.opname == "IMPORT_NAME" and i.argval)
        source = _source_of(code, function.__globals__)
        if source is None:
            self.by_build.add(f"{where} has no source text")
        digests = [
            self._code(code, where) if source is None else _hash("source", _text(source)),
            self.digest(function.__defaults__, f"a default of {where}"),
            self.digest(function.__kwdefaults__, f"a default of {where}"),
            self.digest(function.__dict__, f"{where}.__dict__"),
        ]
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            digests.append(self.digest(cell, f"{variable!r}, which {where} uses"))
        if not filed:
            read = {i.argval for i in _instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
            for variable in sorted(read & function.__globals__.keys()):
                digests += [
                    _hash("name", _text(variable)),
                    self.digest(function.__globals__[variable], f"{module}.{variable}"),
                ]
        return _hash("function", name, *digests)

    def _code(self, code: types.CodeType, path: str) -> bytes:
        return _hash(
            "code",
            code.co_code,
            _text(code.co_name),
            str((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)).encode(),
            *(
                _text("\0".join(names))
                for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
            ),
            getattr(code, "co_exceptiontable", b""),
            *(self.digest(constant, f"a constant of {path}") for constant in code.co_consts),
        )

    def _cell(self, cell: types.CellType, path: str) -> bytes:
        try:
            content = cell.cell_contents
        except ValueError:
            return _hash("empty cell")
        return _hash("cell", self.digest(content, path))

    def _known_object(self, value: Any, path: str) -> bytes | None:
        """Return the hash of an array, frame, series, index, path, broadcast or accumulator; None for other objects.

        Contents are hashed, not pickles: pickles of equal values may differ, for example by memory layout or id.
        """
        match value:
            case np.ndarray() if type(value) is np.ndarray:
                if value.dtype.hasobject:
                    return _hash("array", str(value.shape).encode(), *self._items(value.ravel().tolist(), path))
                described = repr((value.dtype.descr, value.shape)).encode()
                return _hash("array", described, np.ascontiguousarray(value).tobytes())
            case pd.DataFrame():
                columns = [self.digest(value.iloc[:, n], f"{path}.iloc[:, {n}]") for n in range(value.shape[1])]
                return _hash("frame", self._index(value.index, path), self._index(value.columns, path), *columns)
            case pd.Series():
                return _hash("series", self._index(value.index, path), self._index(value, path))
            case pd.Index():
                return _hash("index", self._index(value, path))
            case PurePath() if type(value).__module__.startswith("pathlib"):
                # Don't hash the class's module or the pickle: both differ between versions of Python.
                return _hash("path", _text(type(value).__name__), _text(str(value)))
            case Broadcast():
                try:
                    held = value.value
                except Exception as error:
                    raise _refusal(path, value, f"{type(error).__name__}: {error}") from None
                return _hash("broadcast", self.digest(held, f"{path}.value"))
            case Accumulator():
                # The accumulator's current count is no input of the processor.
                return _hash("accumulator", self.digest(value.accum_param, f"{path}.accum_param"))
        return None

    def _index(self, values: Any, path: str) -> bytes:
        names = list(values.names) if isinstance(values, pd.Index) else [values.name]
        held = np.asarray(values) if isinstance(values.dtype, np.dtype) else list(values)
        return _hash("values", _text(str(values.dtype)), self.digest(names, path), self.digest(held, path))

    def _object(self, value: Any, path: str) -> bytes:
        """Return the hash of an object's class and of the state that pickle would send."""
        cls = type(value)
        if cls.__module__.startswith(("py4j.", "grpc.", "pyspark.")) and not cls.__module__.startswith(_PYSPARK_VALUES):
            raise _refusal(path, value, "it belongs to this Spark session")
        try:
            reducer: Any = copyreg.dispatch_table.get(cls)
            reduced: Any = reducer(value) if reducer is not None else value.__reduce_ex__(4)
        except Exception as error:
            raise _refusal(path, value, f"{type(error).__name__}: {error}") from None
        if isinstance(reduced, str):
            return _hash("global", _text(f"{getattr(value, '__module__', '')}:{reduced}"))
        self._kept.append(reduced)
        make, arguments, state, items, entries = (*reduced, None, None, None)[:5]
        digests = [
            _hash("class", self.digest(cls, f"the class of {path}")),
            self.digest(make, f"the class of {path}"),
            self._sequence(arguments, path),
            self._state(state, path),
            self._sequence(items or (), path),
        ]
        pairs = [
            self.digest(key, f"a key of {path}") + self.digest(v, f"{path}[{_repr(key)}]") for key, v in entries or ()
        ]
        return _hash("object", *digests, *(pairs if isinstance(value, OrderedDict) else sorted(pairs)))

    def _state(self, state: Any, path: str) -> bytes:
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if not all(part is None or type(part) is dict for part in parts):
            return self.digest(state, path)
        attributes = [
            self.digest(name, path) + self.digest(held, f"{path}.{name}")
            for part in parts
            for name, held in (part or {}).items()
        ]
        return _hash("state", *sorted(attributes))


def _hash(kind: str, *parts: bytes) -> bytes:
    digest = hashlib.sha256(f"{kind} {len(parts)}".encode())
    for part in parts:
        digest.update(b" %d:" % len(part))
        digest.update(part)
    return digest.digest()


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _source_of(code: types.CodeType, within: dict[str, Any]) -> str | None:
    """Return the text of a function's definition; None without a source, or if the source has changed after loading."""
    if code.co_filename in ("<string>", "<stdin>"):  # Many sources share these names, so none can be found by them.
        return None
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename, within))
    if code not in _codes_in(text, code.co_filename, code.co_flags & _FUTURE):
        return None
    places = [((a, b), (c, d)) for a, c, b, d in code.co_positions() if a and c and b is not None and d and b != d]
    found = [
        node
        for node, first, begin, end in _functions_in(text)
        if first == code.co_firstlineno
        and getattr(node, "name", "<lambda>") == code.co_name
        and all(begin <= place[0] and place[1] <= end for place in places)
    ]
    # Without columns (`python -X no_debug_ranges`), several functions on one line can't be told apart. With columns,
    # the functions that are found contain each other, and the last one is the innermost: the one of `code`.
    return ast.get_source_segment(text, found[-1]) if len(found) == 1 or (found and places) else None


@lru_cache(maxsize=64)
def _codes_in(text: str, name: str, flags: int) -> frozenset[types.CodeType]:
    """Return the code objects of all functions and classes in a source, as Python compiles the source now."""
    try:
        left = [compile(text, name, "exec", flags, dont_inherit=True)]
    except (SyntaxError, ValueError):
        return frozenset()
    found: set[types.CodeType] = set()
    while left:
        inner = [constant for constant in left.pop().co_consts if isinstance(constant, types.CodeType)]
        found.update(inner)
        left += inner
    return frozenset(found)


@lru_cache(maxsize=64)
def _functions_in(text: str) -> list[tuple[ast.expr | ast.stmt, int, tuple[int, int], tuple[int, int]]]:
    """Return (node, first line, begin of body, end of body) of each function in a source, outer functions first."""
    try:
        nodes = [*ast.walk(parse_source(text))]
    except (SyntaxError, ValueError):
        return []
    found: list[Any] = []
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            body: list[Any] = [node.body] if isinstance(node, ast.Lambda) else node.body
            first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
            begin, end = (body[0].lineno, body[0].col_offset), (body[-1].end_lineno, body[-1].end_col_offset)
            found.append((node, first, begin, end))
    return found


def _has_file(module: str) -> bool:
    """Return True if a file contains the module's code; False for `__main__`, where a prompt may have added code."""
    found = sys.modules.get(module)
    if module == "__main__" or found is None:
        return False
    if getattr(found, "__file__", None) is not None or module in sys.builtin_module_names:
        return True
    return getattr(getattr(found, "__spec__", None), "origin", None) in ("frozen", "built-in")


def _resolve(code: Any) -> Any:
    found: Any = sys.modules.get(code.__module__)
    for part in code.__qualname__.split("."):
        found = getattr(found, part, None)
    return found


def _refusal(path: str, value: Any, why: str) -> UsageError:
    return UsageError(
        f"{path} is a {_type_name(value)}. Cairn can't send it to the workers, because it may differ in each process ({why})\n"
        "Give the processor plain values, such as a name or a path, and create the object in init()"
    )


def _type_name(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _code_name(code: Any) -> str:
    return f"{code.__module__}.{code.__qualname__}"


def _repr(value: Any) -> str:
    try:
        return shorten(value, 60)
    except Exception:
        return f"a {_type_name(value)}"
