"""Find the modules that a processor needs, with their sources.

A module is the user's if it belongs neither to Python, nor to an installed package, nor to Cairn. The search reads the
`import` statements in the modules' sources. To look at the loaded objects would not suffice: a number or a string does
not tell from which module it was imported. The package that defines the processor is recorded module by module, even if
it is installed. Other installed packages that the user's modules import are recorded by version and installed files.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import site
import sys
import sysconfig
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, Literal

import cairn
import state_backend
from cairn.shipping.distributions import InstalledDistribution, distribution_of
from state_backend.values.errors import RetryableError, UsageError
from state_backend.values.frozen import frozen
from state_backend.values.parse_source import parse_source

# The package of the Airflow operators. A module that defines both a DAG and a pipeline imports this package, but
# Spark's workers do not need it. So its modules are never recorded as the user's code.
_OPERATORS = "cairn_operators"
# Packages of Spark. Their modules are never recorded as the user's code.
_SPARK = {"pyspark", "py4j"}
_SITE_FOLDERS = {"site-packages", "dist-packages"}


@frozen
class UserModule:
    """A module that the processor needs, as the driver has it."""

    name: str
    kind: Literal["source", "binary", "namespace", "installed"]
    file: str = ""
    # The `__path__` of a package; None for other modules.
    folders: tuple[str, ...] | None = None
    # The file's bytes; empty for other kinds than "source".
    source: bytes = b""
    # SHA-256, hex, over the file's bytes; "" for a namespace.
    digest: str = ""
    package: str = ""  # For the kind "installed": name and version of the distribution, for messages.


@frozen
class UserCode:
    """Modules of a processor, and the installed distributions that they import. Both are sorted by name."""

    modules: tuple[UserModule, ...]
    distributions: tuple[InstalledDistribution, ...]


def find_user_code(roots: Iterable[str], own: Iterable[str] = ()) -> UserCode:
    """Find the user's modules among `roots` and their imports at any depth, and the installed packages they import.

    `own`: Modules whose packages count as the user's, even if they are installed.
    """
    search = _Search({name.partition(".")[0] for name in own} - _SPARK)
    pending = [name for name in roots if name]
    while pending:
        name = pending.pop()
        if name not in search.seen:
            pending += search.visit(name)
    return UserCode(
        modules=tuple(search.found[name] for name in sorted(search.found)),
        distributions=tuple(search.distributions[name] for name in sorted(search.distributions)),
    )


class _Search:
    def __init__(self, own_packages: set[str]) -> None:
        self._own_packages = own_packages
        self.seen: set[str] = set()
        self.found: dict[str, UserModule] = {}
        self.distributions: dict[str, InstalledDistribution] = {}
        self._specs: dict[str, ModuleSpec | None] = {}

    def visit(self, name: str) -> Iterator[str]:
        """Record a module if it is the user's, and yield the names of its imports."""
        self.seen.add(name)
        spec = self._spec(name)
        module = self._describe(name, spec) if spec is not None else None
        if module is None:
            return
        self.found[name] = module
        if "." in name:
            yield name.rpartition(".")[0]
        source = module.source
        if not source and spec is not None and (spec.origin or "").endswith(".py"):
            source = bytes_of(spec)
        if source:
            yield from _find_imports(source, name, name if module.folders is not None else name.rpartition(".")[0])

    def _describe(self, name: str, spec: ModuleSpec) -> UserModule | None:
        folders = tuple(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
        if not spec.has_location or spec.origin is None:
            users = folders and not any(is_installed(f) or is_runtime(f) for f in folders)
            return UserModule(name=name, kind="namespace", folders=folders) if users else None
        if is_runtime(spec.origin) or name.partition(".")[0] == _OPERATORS:
            return None
        installed = is_installed(spec.origin)
        if installed and (not _is_in_site(spec.origin) or name.partition(".")[0] in _SPARK):
            return None
        package = distribution_of(spec.origin, name) if installed else None
        if package is not None and name.partition(".")[0] not in self._own_packages:
            self.distributions[package.name] = package
            return None
        data = bytes_of(spec)
        common: dict[str, Any] = {"name": name, "file": spec.origin, "folders": folders}
        common["digest"] = _digest_as_imported(name, data)
        if installed:
            said = f"{package.name} {package.version}" if package is not None else "of no known package"
            return UserModule(kind="installed", package=said, **common)
        if spec.origin.endswith(".py"):
            return UserModule(kind="source", source=data, **common)
        return UserModule(kind="binary", **common)

    def _spec(self, name: str) -> ModuleSpec | None:
        """Return the spec of a module, and run neither the module nor its parents; None if there is no such module."""
        if name not in self._specs:
            self._specs[name] = _loaded_spec(name) or self._unloaded_spec(name)
        return self._specs[name]

    def _unloaded_spec(self, name: str) -> ModuleSpec | None:
        if name == "__main__":
            # A notebook's `__main__` has no file. A file that is found as `__main__` would be another module.
            return None
        parent = name.rpartition(".")[0]
        path = None
        if parent:
            above = self._spec(parent)
            if above is None or above.submodule_search_locations is None or not self._is_users(parent, above):
                return None
            path = list(above.submodule_search_locations)
        try:
            return PathFinder.find_spec(name, path)
        except (ImportError, ValueError):
            return None

    def _is_users(self, name: str, spec: ModuleSpec) -> bool:
        """Return True if the package `name` may contain modules of the user.

        A namespace package may also have parts from installed packages. Then it counts only if the processor is in it.
        """
        if self._describe(name, spec) is not None:
            return True
        return not spec.has_location and name.partition(".")[0] in self._own_packages


def _loaded_spec(name: str) -> ModuleSpec | None:
    """Return a loaded module's spec, or for a script a spec of its file; None for a module that is not loaded."""
    module = sys.modules.get(name)
    spec: ModuleSpec | None = getattr(module, "__spec__", None)
    file = getattr(module, "__file__", None)
    if module is None or file is None or (spec is not None and name != "__main__"):
        return spec
    return importlib.util.spec_from_file_location(name, str(Path(file).absolute())) if Path(file).is_file() else None


# By name, of imported modules: the spec, which each import makes anew, and the file's digest when it was first read.
_IMPORTED: dict[str, tuple[object, str]] = {}


def note_imported(names: Iterable[str]) -> None:
    """Remember the bytes of the user's modules among `names`, which this process has just imported.

    The driver runs a module as it was imported, but workers get the bytes of its file, and a deploy may replace these.
    """
    for name in names:
        with suppress(Exception):  # `find_user_code` raises it again, if the module is needed at all.
            spec = _loaded_spec(name)
            file = spec.origin if spec is not None and spec.has_location else None
            if spec is not None and file is not None and not is_runtime(file) and not is_installed(file):
                _digest_as_imported(name, bytes_of(spec))


def _digest_as_imported(name: str, data: bytes) -> str:
    """Return the SHA-256 (hex) of a module's file. Raise `RetryableError` if it differs from the imported module's."""
    digest, module = hashlib.sha256(data).hexdigest(), sys.modules.get(name)
    if module is not None:
        imported = getattr(module, "__spec__", None) or module
        if name not in _IMPORTED or _IMPORTED[name][0] is not imported:
            _IMPORTED[name] = imported, digest
        elif _IMPORTED[name][1] != digest and not _reloads_by_itself():
            raise RetryableError(
                f"{module.__file__} has changed since this process imported it, so workers would run other code than the driver\n"
                "Repeat the command, as Airflow does by itself. In a notebook, restart the kernel"
            )
    return digest


def _reloads_by_itself() -> bool:
    """Return True in a notebook with `%autoreload`, which changes functions in place and leaves the module's spec."""
    return "IPython.extensions.autoreload" in sys.modules


def bytes_of(spec: ModuleSpec) -> bytes:
    """Return the current bytes of a module's file, also from a zip."""
    file = str(spec.origin)
    try:
        return Path(file).read_bytes()
    except OSError as gone:
        loader: Any = spec.loader
        try:
            loader.invalidate_caches()
            data: bytes = loader.get_data(file)
        except (AttributeError, OSError):
            raise UsageError(
                f"the module {spec.name} of the processor can no longer be read: {gone}\nPut the file back, or restart this process without the module"
            ) from None
        return data


@lru_cache(maxsize=1024)
def _find_imports(source: bytes, name: str, package: str) -> tuple[str, ...]:
    """Return the names of modules that a source may import, at the top or in a function."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = parse_source(source)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"the module {name} of the processor can't be parsed: {error}\nCorrect the file") from None
    names: list[str] = []
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                parent = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:
                # This relative import would also fail at run time.
                continue
            names += (parent, *(f"{parent}.{alias.name}" for alias in node.names))
        # Search only statements, because no expression contains an import. To skip expressions saves most of the time.
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            within = getattr(node, block, None)
            if isinstance(within, list):
                pending += within
    return tuple(names)


def spec_here(name: str, path: Any, finders: Sequence[Any]) -> ModuleSpec | None:
    """Return a module's spec from the first finder that has it; None if none has. `path`: Its package's `__path__`."""
    for finder in finders:
        try:
            spec: ModuleSpec | None = finder.find_spec(name, path, None)
        except Exception:
            continue
        if spec is not None:
            return spec
    return None


def bytes_here(name: str, finders: Sequence[Any]) -> bytes | None:
    """Return the bytes of a module's file in this process, without running the module; None if no finder has it."""
    spec = _spec_in(name, finders)
    return None if spec is None else bytes_of(spec)


def _spec_in(name: str, finders: Sequence[Any]) -> ModuleSpec | None:
    path: Any = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for n in range(len(parts)):
        spec = spec_here(".".join(parts[: n + 1]), path, finders)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def package_here(name: str, finders: Sequence[Any]) -> str:
    """Return name and version of a module's distribution in this process ("numpy 2.1.0"), or say that there is none."""
    spec = _spec_in(name, finders)
    if spec is None or spec.origin is None:
        return "not installed"
    package = distribution_of(spec.origin, name)
    return f"{package.name} {package.version}" if package is not None else "of no known package"


def runtime_sources() -> Iterator[tuple[str, str, bytes]]:
    """Yield (path, file, bytes) of each module of Cairn's packages `state_backend` and `cairn`, in a fixed order.

    `path` is relative to the package's folder. The package may be in a zip, because `--py-files` sends a zip.
    """
    for package in (state_backend, cairn):
        yield from _sources_of(package)


def _sources_of(package: ModuleType) -> Iterator[tuple[str, str, bytes]]:
    for root in package.__path__:
        archive = getattr(package.__loader__, "archive", None)
        if archive is None:
            for file in sorted(Path(root).glob("**/*.py")):
                yield file.relative_to(root).as_posix(), str(file), file.read_bytes()
            continue
        within = Path(root).relative_to(archive).as_posix() + "/"
        with zipfile.ZipFile(archive) as zipped:
            names = [n for n in zipped.namelist() if n.startswith(within) and n.endswith(".py")]
            for name in sorted(names, key=lambda n: PurePath(n).parts):
                yield name.removeprefix(within), f"{archive}/{name}", zipped.read(name)


def runtime_archive(file: Path) -> None:
    """Write Cairn's own packages `state_backend` and `cairn` as a zip that Python can import from.

    A driver sends the zip to the executors of a Spark cluster. It holds only Python sources. Equal sources produce
    equal bytes.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
        for package in (state_backend, cairn):
            for name, _, source in _sources_of(package):
                zipped.writestr(zipfile.ZipInfo(f"{package.__name__}/{name}"), source)


@cache
def is_runtime(file: str) -> bool:
    """Return True if the file is a module of Cairn itself."""
    return file in _runtime()


@cache
def _runtime() -> frozenset[str]:
    return frozenset(file for _, file, _ in runtime_sources())


@cache
def is_installed(file: str) -> bool:
    """Return True if the file belongs to Python or to an installed package, also to a PySpark in SPARK_HOME."""
    return _is_in_site(file) or any(_is_below(file, folder) for folder in _list_installed())


def _is_in_site(file: str) -> bool:
    parts = PurePath(file).parts
    return not _SITE_FOLDERS.isdisjoint(parts) or any(_is_below(file, folder) for folder in _packages())


@cache
def _packages() -> frozenset[str]:
    """Return the folders of installed packages, as Python's build defines them.

    Some builds of Python install packages directly into the folder of the standard library. That folder is left out:
    otherwise the modules of the standard library would be taken for installed packages.
    """
    return frozenset(map(sysconfig.get_path, ("purelib", "platlib"))) - {sysconfig.get_path("stdlib")}


def _is_below(file: str, folder: str) -> bool:
    return file == folder or file.startswith(folder.rstrip("/") + "/")


@cache
def _list_installed() -> tuple[str, ...]:
    own = [str(Path(str(sys.modules[name].__file__)).parent) for name in ("pyspark", "py4j") if name in sys.modules]
    paths = [sysconfig.get_path(p) for p in ("stdlib", "platstdlib", "purelib", "platlib")]
    return (*paths, *own, *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []))
