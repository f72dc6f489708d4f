"""Send a processor and its code to the workers.

A Spark server lives longer than one interval, and its workers may have imported an older version of the processor. So
the sources of the user's modules travel with every task (docs/design-state.md, "Code on the workers"). The processor's
pickle names these modules, and does not contain their code.

While a worker unpickles the processor, it imports the modules from the shipped sources. So the worker runs exactly the
driver's bytes. If an earlier task in this worker imported other bytes, the worker first removes the old modules. If the
worker has a file with the same bytes, the module gets the path of this file, and finds data beside it.

An import runs a module's code in the worker. So the worker makes the module's locks, loggers and clients itself, and
they are not pickled. The import fails if a module needs something that only the driver has. Then the worker loads a
second pickle, which contains the code of the classes and functions and needs no import (a pickle by value).

Cairn's own packages (the runtime) do not travel: a task refuses to run if the worker's differ from the driver's.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib
import io
import pickle
import socket
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ExtensionFileLoader, FileFinder, ModuleSpec
from importlib.util import decode_source, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar, cast

from pyspark import cloudpickle

import cairn
from cairn.range_sources import RangeSource
from cairn.shipping.distributions import InstalledDistribution, distribution_here
from cairn.shipping.user_modules import (
    UserCode,
    UserModule,
    bytes_here,
    bytes_of,
    find_user_code,
    package_here,
    runtime_sources,
    spec_here,
)
from cairn.shipping.value_hash import ValueHasher
from cairn.spark_versions import Broadcast, id_of_broadcast, made_broadcast
from state_backend.values.errors import ProcessorError, RetryableError, UsageError, UserCodeError
from state_backend.values.frozen import frozen

P = ParamSpec("P")
T = TypeVar("T")


@frozen
class ShippedProcessor:
    """Packed processor of a pipeline. The driver packs it for an interval; a worker calls it to get the processor."""

    name: str
    code_hash: str
    modules: tuple[UserModule, ...]
    distributions: tuple[InstalledDistribution, ...]
    by_reference: bytes  # A pickle that names the user's modules, without their code.
    # A pickle that contains the code of the modules; None if the processor has no user module, or if this pickle is not
    # possible.
    by_value: bytes | None
    no_value: str  # Why `by_value` is not possible, for an error message; "" otherwise.
    broadcasts: tuple[tuple[int, bytes], ...]  # Id and pickled value of each broadcast variable.
    # Names of the parts of the code whose hash, and so `code_hash`, differs between versions of Python.
    by_build: tuple[str, ...] = ()

    def __call__(self) -> Any:
        return _make(self._load(), self.name)

    def _load(self) -> Any:
        with _values_of(self.broadcasts):
            try:
                _check_distributions(self.distributions)
                import_as_shipped(self.modules)
                form = cloudpickle.loads(self.by_reference)
                for module in self.modules:
                    if module.kind == "installed" and module.name in sys.modules:
                        _LOADED[module.name] = (sys.modules[module.name], module.digest)
                return form
            except (UsageError, UserCodeError):
                raise
            except (Exception, SystemExit) as error:
                if self.by_value is None:
                    raise UsageError(
                        f"the worker {socket.gethostname()} can't load the processor {self.name}: "
                        f"{type(error).__name__}: {error}\nInstall what is missing on the worker, or send it with --py-files or "
                        f"spark.sparkContext.addPyFile{self.no_value}"
                    ) from error
            return cloudpickle.loads(self.by_value)


# Results of the functions with `@_once` for each value, within a `code_of_one_call`; None outside of such a call.
_FOUND: ContextVar[dict[Any, Any] | None] = ContextVar("_FOUND", default=None)


@contextmanager
def code_of_one_call() -> Iterator[None]:
    """Within this context, hash and pack each processor or source only once, and use that result again."""
    token = _FOUND.set({} if (outer := _FOUND.get()) is None else outer)
    try:
        yield
    finally:
        _FOUND.reset(token)


def _once(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def find(*arguments: P.args, **named: P.kwargs) -> T:
        found, value = _FOUND.get(), arguments[0]
        if found is None:
            return function(*arguments, **named)
        key = function, id(value), arguments[1:]
        if key not in found:
            found[key] = value, function(*arguments, **named)  # Keep the value, so that no new value gets its id.
        return cast(T, found[key][1])

    return find


@_once
def ship_processor(processor: Any, pipeline: str) -> ShippedProcessor:
    """Pack a processor: a class, an instance, a partial, or a function that returns a processor."""
    with _name_pipeline(pipeline):
        digest, code, by_build = _hash_code(processor)
        modules: Sequence[UserModule] = code.modules
        _LOADED.update((m.name, (sys.modules[m.name], m.digest)) for m in modules if m.name in sys.modules)
        broadcasts: dict[int, Broadcast[Any]] = {}
        by_reference = _pickle(processor, broadcasts)
        modules = [m for m in modules if m.name != "__main__"]
        by_value, no_value = None, ""
        if any(m.kind == "source" for m in modules):
            try:
                by_value = _pickle_by_value(processor, modules, broadcasts)
            except (UsageError, UserCodeError) as error:
                no_value = f"\nThe processor can't be sent together with its code either: {_blame(modules) or error}"
        return ShippedProcessor(
            name=name_of(processor),
            code_hash=digest,
            modules=tuple(replace(m, source=zlib.compress(m.source)) for m in modules),
            distributions=code.distributions,
            by_reference=by_reference,
            by_value=by_value,
            no_value=no_value,
            broadcasts=tuple((number, _pickle(b.value, {})) for number, b in broadcasts.items()),
            by_build=by_build,
        )


def processor_on_driver(processor: Any, pipeline: str) -> Any:
    """Make a new processor in this process, from a copy, so that its changes affect no worker and no later interval."""
    file = io.BytesIO()
    with _name_pipeline(pipeline):
        copier = _Copier(file)
        _dump(copier, processor)
        file.seek(0)
        return _make(_CopyReader(file, copier.kept).load(), name_of(processor))


def code_hash(processor: Any, pipeline: str) -> str:
    """Return the SHA-256 (hex) over a processor, its arguments, and the code that it needs.

    The needed code is the sources of the user's modules, and the names, versions and digests of the distributions that
    these modules import.
    """
    with _name_pipeline(pipeline):
        return _hash_code(processor)[0]


def name_of(processor: Any) -> str:
    """Return a processor's name for messages: the name of its class, or of the function that makes the processor."""
    if isinstance(processor, functools.partial):
        return name_of(processor.func)
    return str(getattr(processor, "__name__", None) or type(processor).__name__)


def ship(task: object) -> str:
    """Return a job as text, for `unship` in a worker. The text also contains the version of the driver's Cairn."""
    return base64.b64encode(zlib.compress(cloudpickle.dumps((runtime_version(), cloudpickle.dumps(task))), 1)).decode()


@_once
def _hash_code(processor: Any) -> tuple[str, UserCode, tuple[str, ...]]:
    hasher = ValueHasher()
    value = hasher.digest(processor, "the processor")
    code = find_user_code(hasher.modules, own=[getattr(_code_of(processor), "__module__", None) or ""])
    digest = hashlib.sha256(value)
    for module in code.modules:
        digest.update(f"{module.name}\0{module.digest}\0".encode())
    for package in code.distributions:
        digest.update(f"{package.name}\0{package.version}\0{package.digest}\0".encode())
    compiled = {f"{package.name} has compiled files" for package in code.distributions if not package.is_pure}
    return digest.hexdigest(), code, tuple(sorted(hasher.by_build | compiled))


def _code_of(processor: Any) -> Any:
    while isinstance(processor, functools.partial | RangeSource):
        processor = processor.func if isinstance(processor, functools.partial) else processor.function
    return processor if hasattr(processor, "__qualname__") else type(processor)


def _make(form: Any, name: str) -> Any:
    made = form if not isinstance(form, type) and hasattr(form, "init") else form()
    if isinstance(made, type) or not hasattr(made, "init"):
        what = f"the class {made.__name__}" if isinstance(made, type) else f"a {type(made).__name__}"
        raise ProcessorError(f"{name} returned {what}; it must return a processor, an object with init()")
    return made


@contextmanager
def _name_pipeline(pipeline: str) -> Iterator[None]:
    try:
        yield
    except (RetryableError, UsageError, UserCodeError) as error:
        raise type(error)(f"pipeline {pipeline!r}: {error}") from error.__cause__


def pickle_by_value(function: Any) -> None:
    """From now on, let Spark pickle code, not only names, of functions in the modules that `function` uses.

    Otherwise, Spark Connect sends only the name of a UDF's module. A worker of the UDF runs no code of Cairn, and
    would use a module that a task of another session had imported.
    """
    for module in _hash_code(function)[1].modules:
        if module.kind == "source" and module.name in sys.modules:
            cloudpickle.register_pickle_by_value(sys.modules[module.name])


class _ByReference(cloudpickle.Pickler):
    """Pickler that names what can be imported, also from modules that `pickle_by_value` has registered."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, type | FunctionType) and _can_be_imported(obj):
            return NotImplemented
        return super().reducer_override(obj)


def _can_be_imported(obj: type | FunctionType) -> bool:
    try:
        return obj.__module__ != "__main__" and attrgetter(obj.__qualname__)(sys.modules[obj.__module__]) is obj
    except (AttributeError, KeyError):
        return False


class _Pickler(_ByReference):
    """Pickler that replaces broadcast variables by their ids.

    Spark sends the values of broadcast variables only with functions that Spark itself pickles. A processor is not
    pickled by Spark, so `ShippedProcessor` sends the values.
    """

    def __init__(self, file: Any, broadcasts: dict[int, Broadcast[Any]], by_value: bool) -> None:
        super().__init__(file)
        self._broadcasts, self._by_value = broadcasts, by_value

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Broadcast) and (number := id_of_broadcast(obj)) is not None:
            self._broadcasts[number] = obj
            return _broadcast, (number,)
        return cloudpickle.Pickler.reducer_override(self, obj) if self._by_value else super().reducer_override(obj)


def _pickle(value: Any, broadcasts: dict[int, Broadcast[Any]], *, by_value: bool = False) -> bytes:
    file = io.BytesIO()
    _dump(_Pickler(file, broadcasts, by_value), value)
    return file.getvalue()


def _dump(pickler: cloudpickle.Pickler, value: Any) -> None:
    try:
        pickler.dump(value)
    except (UsageError, UserCodeError):
        raise
    except Exception as error:
        raise UsageError(f"the processor can't be sent to the workers: {type(error).__name__}: {error}") from error


class _Copier(_ByReference):
    """Pickler for a copy in the same process, which keeps classes, modules and broadcast variables by identity.

    If a class from a notebook were pickled and loaded in the notebook's own process, its methods would be copied. The
    copies would not see later changes of the notebook's variables.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.kept: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, type | ModuleType | Broadcast):
            return None
        self.kept.append(obj)
        return len(self.kept) - 1


class _CopyReader(pickle.Unpickler):
    def __init__(self, file: Any, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, pid: Any) -> Any:
        return self._kept[pid]


def _pickle_by_value(processor: Any, modules: Sequence[UserModule], broadcasts: dict[int, Broadcast[Any]]) -> bytes:
    registered = []
    for module in modules:
        if (
            module.kind == "source"
            and module.name in sys.modules
            and module.name not in cloudpickle.list_registry_pickle_by_value()
        ):
            cloudpickle.register_pickle_by_value(sys.modules[module.name])
            registered.append(sys.modules[module.name])
    try:
        return _pickle(processor, broadcasts, by_value=True)
    finally:
        for loaded in registered:
            cloudpickle.unregister_pickle_by_value(loaded)


def _blame(modules: Sequence[UserModule]) -> str:
    """Return in words the first object of these modules that can't be pickled, and why; "" if all can be pickled.

    Containers are tried last, because they may be large.
    """
    candidates = [
        (isinstance(value, dict | list | tuple | set), f"{module.name}.{name}", value)
        for module in modules
        for name, value in vars(sys.modules.get(module.name, object)).items()
        if not name.startswith("__") and not isinstance(value, type | ModuleType)
    ]
    for _, name, value in sorted(candidates, key=lambda candidate: candidate[0]):
        try:
            _pickle(value, {})
        except (UsageError, UserCodeError) as error:
            return f"{name} is a {type(value).__name__} ({error.__cause__})"
    return ""


def unship(option: str) -> Any:
    """Return the job that `ship` packed, in a worker. Raise `UsageError` if the driver has another version of Cairn."""
    version, task = cloudpickle.loads(zlib.decompress(base64.b64decode(option)))
    if version != runtime_version():
        raise UsageError(
            f"the worker {socket.gethostname()} runs another version of Cairn than the driver: {runtime_version()} (in "
            f"{Path(cairn.__path__[0]).parent}) on the worker, {version} on the driver\n"
            "Install the driver's version on the worker, and restart the Spark server"
        )
    return cloudpickle.loads(task)


@cache
def runtime_version() -> str:
    """Return 16 hex digits of a hash over the sources of Cairn's packages `state_backend` and `cairn`.

    The sources are read from disk when this process first calls the function. The hash leaves out the number of the
    version, which each build writes into `_version.py`: a wheel and a clone of the same sources must have equal hashes,
    also if one of them was built without git tags.
    """
    digest = hashlib.sha256()
    for name, _, source in runtime_sources():
        if name != "values/_version.py":
            digest.update(name.encode() + b"\0" + source)
    return digest.hexdigest()[:16]


# The user's modules that this process has loaded, by name, each with the SHA-256 of its bytes.
_LOADED: dict[str, tuple[ModuleType, str]] = {}
_BROADCASTS: dict[int, bytes] = {}  # By id: the pickled broadcast variables of the processor that is being loaded.


def import_as_shipped(modules: Sequence[UserModule]) -> None:
    """Make this process import these modules from their shipped bytes.

    If a loaded module has other bytes, all loaded user modules are removed, because they may hold objects of the old
    version.
    """
    for finder in sys.path_importer_cache.values():
        # Clear only the caches of folders. If the cache of a zip were cleared, the zip would be read again for each of
        # its packages: 0.3 s a task for Spark's own zips. `bytes_of` clears a zip's cache when it reads a module in it.
        if isinstance(finder, FileFinder):
            finder.invalidate_caches()
    for module in modules:
        if module.kind == "installed":
            _check_installed(module)
    if any(_is_stale(m) for m in modules):
        _forget({m.name for m in modules if m.kind in ("source", "installed")} | set(_LOADED))
    _FINDER.modules = {m.name: m for m in modules}
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _is_stale(module: UserModule) -> bool:
    loaded = sys.modules.get(module.name)
    if loaded is None or module.kind in ("binary", "namespace"):
        return False
    return _LOADED.get(module.name) != (loaded, module.digest)


def _forget(names: set[str]) -> None:
    _LOADED.clear()
    for name, module in list(sys.modules.items()):
        within = name in names or any(name.startswith(f"{n}.") for n in names)
        # Python can't load an extension module twice in one process.
        if within and not isinstance(getattr(module, "__loader__", None), ExtensionFileLoader):
            del sys.modules[name]


def _check_installed(module: UserModule) -> None:
    others = _others()
    data = bytes_here(module.name, others)
    found = "missing" if data is None else hashlib.sha256(data).hexdigest()
    if found != module.digest:
        raise UsageError(
            f"the module {module.name} differs between the worker {socket.gethostname()} and the driver: {found[:12]} "
            f"({package_here(module.name, others)}) on the worker, {module.digest[:12]} ({module.package}) on the driver\n"
            "Install the same version of the package on both"
        )


def _check_distributions(wanted: Sequence[InstalledDistribution]) -> None:
    """Raise `UsageError` if an installed distribution has another version or other files than on the driver.

    A missing distribution raises no error: a module may import a package that only the driver uses. If the worker needs
    the package, the import itself fails.
    """
    for package in wanted:
        found = distribution_here(package.name)
        if found is None:
            continue
        # Digests are compared for pure packages only: a compiled package has other files on another platform.
        comparable = package.is_pure and found.is_pure and package.digest and found.digest
        if found.version != package.version or (comparable and found.digest != package.digest):
            raise UsageError(
                f"the processor needs the package {package.name}, which differs between the worker {socket.gethostname()} and the "
                f"driver: {_version(found)} on the worker, {_version(package)} on the driver\n"
                "Install the same version on both, and restart the Spark server"
            )


def _version(package: InstalledDistribution) -> str:
    return f"{package.version} ({package.digest[:12] or 'no RECORD'})"


def _others() -> list[Any]:
    """Return the import finders in `sys.meta_path`, without Cairn's finder of shipped modules."""
    return [finder for finder in sys.meta_path if finder is not _FINDER and hasattr(finder, "find_spec")]


class _Finder(MetaPathFinder):
    """Finder of the modules that were shipped with this process's current task."""

    def __init__(self) -> None:
        self.modules: dict[str, UserModule] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        module = self.modules.get(fullname)
        if module is None or module.kind not in ("source", "namespace"):
            return None
        here = spec_here(fullname, path, _others())
        if module.kind == "namespace":
            if here is not None:
                return None
            spec = ModuleSpec(module.name, None, is_package=True)
            spec.submodule_search_locations = list(module.folders or ())
            return spec
        source = zlib.decompress(module.source)
        file, folders, inner = module.file, list(module.folders or ()), None
        if here is not None and _is_file_of(here, source):
            file, folders, inner = str(here.origin), list(here.submodule_search_locations or ()), here.loader
        return spec_from_file_location(
            fullname,
            file,
            loader=_Loader(module.digest, source, inner),
            submodule_search_locations=None if module.folders is None else folders,
        )


def _is_file_of(spec: ModuleSpec, source: bytes) -> bool:
    try:
        return spec.has_location and bytes_of(spec) == source
    except (UsageError, UserCodeError):
        return False


class _Loader(Loader):
    """Loader that runs exactly the shipped bytes.

    Python's own loader might run the cached compilation of an older file: it compares only the file's time, in seconds,
    and its size. `inner`: The loader of the same file on this host, which reads data beside the file; None if this host
    lacks the file.
    """

    def __init__(self, digest: str, source: bytes, inner: Any) -> None:
        self._digest = digest
        self._source = source
        self._inner = inner

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        _LOADED[spec.name] = (module, self._digest)
        exec(compile(self._source, str(spec.origin), "exec", dont_inherit=True), module.__dict__)

    def get_source(self, fullname: str) -> str:
        """Return the source, which tracebacks show even if the worker lacks the file."""
        return decode_source(self._source)

    def get_data(self, path: str) -> bytes:
        if self._inner is not None:
            data: bytes = self._inner.get_data(path)
            return data
        return Path(path).read_bytes()

    def get_resource_reader(self, name: str) -> Any:
        reader = getattr(self._inner, "get_resource_reader", None)
        return reader(name) if reader is not None else None


_FINDER = _Finder()


def _broadcast(number: int) -> Any:
    return made_broadcast(cloudpickle.loads(_BROADCASTS[number]))


@contextmanager
def _values_of(broadcasts: Sequence[tuple[int, bytes]]) -> Iterator[None]:
    _BROADCASTS.update(broadcasts)
    try:
        yield
    finally:
        _BROADCASTS.clear()
