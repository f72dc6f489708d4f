"""How a processor with its arguments and modules reaches another process, and what its hash says. Without Spark."""

from __future__ import annotations

import ast
import base64
import dataclasses
import gc
import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
import zipfile
import zipimport
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from pyspark import cloudpickle

from cairn.pipeline import Pipeline
from cairn.shipping import distributions, user_modules
from cairn.shipping import ship_processor as shipping
from cairn.shipping.ship_processor import (
    code_hash,
    code_of_one_call,
    import_as_shipped,
    name_of,
    processor_on_driver,
    ship,
    ship_processor,
)
from cairn.shipping.user_modules import UserModule, _find_imports, bytes_of, find_user_code
from cairn.shipping.value_hash import ValueHasher
from state_backend.values.errors import ProcessorError, UsageError
from state_backend.values.parse_source import parse_source
from tests.support.counting import counting
from tests.support.layout import REPOSITORY

_FILES = {
    "shop/__init__.py": "import socket, threading\nLOCK, SOCKET = threading.Lock(), socket.socket()\n",
    "shop/parts/__init__.py": "",
    "shop/parts/prices.py": "from .. import LOCK\nfrom . import words\ndef tell():\n    with LOCK:\n        return words.WORD\n",
    "shop/parts/words.py": "WORD = 'one'\n",
    "spread/there.py": "WORD = 'spread'\n",
    "late.py": "WORD = 'late'\n",
    "shopping.py": """
import logging, threading
from shop.parts import prices
from shop.parts.words import WORD
from spread import there
import only_zipped, zipped_here, xxlimited
LOG = logging.getLogger("shopping")
LOG.addHandler(logging.StreamHandler())
LOCK, CALLS, HIDDEN = threading.Lock(), [], "hidden"

class Shopper:
    def __init__(self, *arguments):
        self.arguments = arguments
    def init(self, handle):
        self.arguments[0].append("init")
    def tell(self):
        import late
        with LOCK:
            CALLS.append(1)
        self.arguments[0].append("told")
        words = [WORD, prices.tell(), there.WORD, late.WORD, only_zipped.WORD, eval("HID" + "DEN"), xxlimited.__name__]
        return " ".join(words), len(CALLS), self.arguments[0], zipped_here.data()
""",
    "driver_only.py": "import os\nos.environ['CAIRN_TEST_DRIVER']\nclass Valued:\n    def init(self, handle): pass\n"
    "    def tell(self): return 'by value'\n",
    "locked_driver_only.py": "import os, threading\nos.environ['CAIRN_TEST_DRIVER']\nLOCK = threading.Lock()\nclass Locked:\n"
    "    def init(self, handle): pass\n    def tell(self): return LOCK.locked()\n",
    "site-packages/bought/__init__.py": "",
    "site-packages/bought/processors.py": "from bought.rates import RATE\nclass Bought:\n    def init(self, handle): pass\n",
    "site-packages/bought/rates.py": "RATE = 1\n",
    "site-packages/corp/sums/adder.py": "class Adder:\n    def init(self, handle): import corp.sums.rates\n",
    "site-packages/corp/sums/rates.py": "RATE = 1\n",
    "site-packages/sold/__init__.py": "class Sold:\n    def init(self, handle): pass\n    def tell(self): return 'sold'\n"
    "def add(a, b): return a + b\n",
    "site-packages/sold_goods-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: sold-goods\nVersion: 1.0\n",
    "site-packages/sold_goods-1.0.dist-info/WHEEL": "Root-Is-Purelib: true\n",
    "site-packages/sold_goods-1.0.dist-info/RECORD": "sold/__init__.py,sha256=one,9\n../../bin/sell,sha256=host,9\n",
    "sells.py": "import sold\nclass Mine(sold.Sold): pass\ndef make(): return sold.Sold()\n"
    "class Holder(Mine):\n    def __init__(self, call): self.call = call\n",
    "unpacked.py": "import bought.processors as b\ndef make(): return b.Bought()\n",
}

_WORKER = """
import json, sys
from cairn.shipping.ship_processor import unship
for option in sys.stdin:
    try:
        print(json.dumps(unship(option.strip())().tell()))
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's modules, on this process's path."""
    before = set(sys.modules)
    for name, text in _FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for zipped, name, text in (
        ("driver.zip", "only_zipped.py", "import threading\nLOCK, WORD = threading.Lock(), 'zipped'\n"),
        (
            "both.zip",
            "zipped_here.py",
            "import pkgutil\ndef data(): return pkgutil.get_data(__name__, 'data.txt').decode()\n",
        ),
    ):
        with zipfile.ZipFile(tmp_path / zipped, "w") as file:
            file.writestr(name, text)
            file.writestr("data.txt", "data of the zip")
    compiled = importlib.util.find_spec("xxlimited")
    assert compiled is not None and compiled.origin is not None, "no compiled module to copy"
    shutil.copy(compiled.origin, tmp_path)
    for path in ("driver.zip", "both.zip", "site-packages", ""):
        monkeypatch.syspath_prepend(str(tmp_path / path))
    monkeypatch.setenv("CAIRN_TEST_DRIVER", "1")
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            if name == "shop":
                sys.modules[name].SOCKET.close()
            del sys.modules[name]


def unload() -> None:
    users = ("shop", "shopping", "spread", "corp", "bought", "sold", "sells", "unpacked")
    for loaded in [m for m in sys.modules if m.partition(".")[0] in users]:
        if loaded == "shop":
            sys.modules[loaded].SOCKET.close()
        del sys.modules[loaded]
    importlib.invalidate_caches()


def new(module: str, name: str) -> Any:
    """A class of a module that is imported anew, as another driver would."""
    unload()
    return getattr(importlib.import_module(module), name)


def python(argument: list[str], given: str, environment: dict[str, str]) -> str:
    how: dict[str, Any] = {"cwd": REPOSITORY.parent, "capture_output": True, "text": True}
    ran = subprocess.run([sys.executable, *argument], input=given, env=environment, check=False, **how)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def in_worker(options: list[str], path: list[Path], root: Path | None = REPOSITORY) -> list[Any]:
    """What one other process makes of the options, one after another. It has only ``path``."""
    environment = {k: v for k, v in os.environ.items() if k != "CAIRN_TEST_DRIVER"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, [*path, root])))
    return [json.loads(line) for line in python(["-c", _WORKER], "\n".join(options), environment).splitlines()]


def test_workers_load_user_modules_from_the_code_that_the_driver_ships(folder: Path) -> None:
    """Locks, sockets, loggers, relative imports, packages with and without ``__init__``, zips on one side and on both, compiled
    modules, an import within a function, a name that only ``eval`` sees. A module stays between tasks until one of them has
    changed; a processor and its arguments are new in each."""
    old = folder / "worker"  # an older deploy, which must not count
    (old / "shop/parts").mkdir(parents=True)
    for name in ("shop/__init__.py", "shop/parts/__init__.py"):
        (old / name).write_text(_FILES[name])
    (old / "shop/parts/words.py").write_text("WORD = 'old'\n")

    processor = new("shopping", "Shopper")(["given"])
    first = ship_processor(processor, "p")
    processor_on_driver(processor, "p").init(None)
    assert processor.arguments == (["given"],), "what init does on the driver stays there"
    (folder / "shop/parts/words.py").write_text("WORD = 'two'\n")
    second = ship_processor(new("shopping", "Shopper")(["given"]), "p")
    assert first.code_hash != second.code_hash
    by_value = ship_processor(new("driver_only", "Valued"), "p")
    neither = ship_processor(new("locked_driver_only", "Locked"), "p")

    told = in_worker(
        [ship(task) for task in (first, first, second, first, by_value, neither, second)], [old, folder / "both.zip"]
    )

    def words(word: str, calls: int) -> Any:
        told = f"{word} {word} spread late zipped hidden xxlimited"
        return [told, calls, ["given", "told"], "data of the zip"]

    assert told[:5] == [words("one", 1), words("one", 2), words("two", 1), words("one", 1), "by value"]
    assert "UsageError: the worker " in told[5] and " can't load the processor Locked: " in told[5]
    assert (
        "KeyError: 'CAIRN_TEST_DRIVER'" in told[5]
        and "The processor can't be sent together with its code either: locked_driver_only.LOCK is a lock (cannot pickle"
        in told[5]
    )
    assert told[6] == words("two", 1)


@pytest.mark.long("seconds", runs_in="ci")
@pytest.mark.parametrize(("here", "reader"), [(SimpleNamespace(get_resource_reader=str.upper), "MODULE"), (None, None)])
def test_package_data_of_a_shipped_module_are_read_from_the_workers_copy(here: Any, reader: str | None) -> None:
    assert shipping._Loader("digest", b"", here).get_resource_reader("module") == reader


def test_functions_of_a_source_are_pickled_with_their_code_and_processors_still_by_name(folder: Path) -> None:
    make = importlib.import_module("sells").make
    before = ship_processor(make, "p")
    shipping.pickle_by_value(make)
    try:
        assert ship_processor(make, "p") == before
        assert cloudpickle.loads(shipping._pickle(partial(make), {})).func is make
        assert cloudpickle.loads(cloudpickle.dumps(make)) is not make
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules["sells"])


def test_an_installed_processor_is_hashed_by_its_package_and_required_on_workers(folder: Path) -> None:
    def hashed() -> str:
        return code_hash(new("bought.processors", "Bought"), "p")

    before = hashed()
    shipped = ship_processor(new("bought.processors", "Bought"), "p")
    assert [(m.name, m.kind) for m in shipped.modules] == [
        (name, "installed") for name in ("bought", "bought.processors", "bought.rates")
    ]
    (folder / "site-packages/bought/rates.py").write_text("RATE = 2\n")
    assert hashed() != before
    changed, missing = (in_worker([ship(shipped)], path)[0] for path in ([folder / "site-packages"], []))
    assert (
        "UsageError: the module bought.rates differs between the worker " in changed
        and "(of no known package) on the driver\nInstall" in changed
    )
    assert "UsageError: the module bought differs between the worker " in missing and ": missing (" in missing


def test_an_installed_module_stays_between_tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "_LOADED", {})
    task = ship_processor(new("bought.processors", "Bought"), "p")
    shipping._forget({"bought"})  # As in a worker.
    assert task._load() is task._load()


def test_modules_in_the_package_folder_of_python_count_as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_modules, "_packages", lambda: {"/opt/python/lib"})
    assert [user_modules._is_in_site(f"/opt/python/{file}") for file in ("lib/sold.py", "library.py")] == [True, False]


def forget_distributions() -> None:
    """As a new driver, which reads once what is installed."""
    for cached in ("distribution_of", "_infos", "_contents", "_installed_at"):
        getattr(distributions, cached).cache_clear()


def test_the_code_hash_covers_installed_packages_that_user_modules_use(folder: Path) -> None:
    """A factory, a subclass and an argument that an installed package brings, a namespace that packages share, and code that no
    distribution says to have installed: each counted by name only, so that a retry took what the code before an upgrade had made."""

    def hashes() -> dict[str, str]:
        unload()
        forget_distributions()
        sells, sold = importlib.import_module("sells"), importlib.import_module("sold")
        forms = {
            "factory": sells.make,
            "subclass": sells.Mine,
            "argument": sells.Holder(sold.add),
            "namespace": importlib.import_module("corp.sums.adder").Adder,
            "unpacked": importlib.import_module("unpacked").make,
        }
        return {name: code_hash(form, "p") for name, form in forms.items()}

    site, info = folder / "site-packages", folder / "site-packages/sold_goods-1.0.dist-info"
    before = hashes()
    assert hashes() == before
    (info / "RECORD").write_text("sold/__init__.py,sha256=one,9\n../../bin/sell,sha256=another host,9\n")
    assert hashes() == before, "a script that the installer wrote is none of the code"
    (info / "RECORD").write_text("sold/__init__.py,sha256=two,9\n")
    (site / "corp/sums/rates.py").write_text("RATE = 2\n")
    (site / "bought/rates.py").write_text("RATE = 2\n")
    assert {name for name, digest in hashes().items() if digest == before[name]} == set()


@pytest.mark.long("seconds", runs_in="ci")
def test_workers_refuse_another_version_of_what_the_users_modules_import(folder: Path) -> None:
    forget_distributions()
    shipped = ship(ship_processor(new("sells", "Mine"), "p"))
    site = folder / "site-packages"
    assert in_worker([shipped], [site]) == ["sold"]
    (site / "sold_goods-1.0.dist-info/RECORD").write_text("sold/__init__.py,sha256=two,9\n")
    same_version = in_worker([shipped], [site])[0]
    shutil.move(site / "sold_goods-1.0.dist-info", site / "sold_goods-1.1.dist-info")
    (site / "sold_goods-1.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sold-goods\nVersion: 1.1\n")
    newer, here = in_worker([shipped], [site])[0], f"worker {socket.gethostname()}"
    for told, version in ((same_version, "1.0"), (newer, "1.1")):
        assert "the package sold-goods, which differs" in told and f"the driver: {version} (" in told
        assert here in told and " on the worker, 1.0 (" in told and "on the driver\nInstall" in told


@pytest.mark.long("seconds", runs_in="ci")
def test_the_runtime_may_lie_in_a_zip(folder: Path) -> None:
    """As --py-files and an archive bring it. It counted as another version, and the advice was to restart a server. An older one is
    refused by the worker's host and path."""
    shipped = ship(ship_processor(new("bought.processors", "Bought"), "p"))

    def told_by(change: str) -> Any:
        with zipfile.ZipFile(folder / "runtime.zip", "w") as file:
            for package, root in (("cairn", REPOSITORY / "jobs"), ("state_backend", REPOSITORY)):
                for module in (root / package).rglob("*.py"):
                    name = module.relative_to(root).as_posix()
                    more = change if name == "cairn/operations/copy_output.py" else ""
                    file.writestr(name, module.read_text() + more)
        return in_worker([shipped], [folder / "runtime.zip", folder / "site-packages"], root=None)[0]

    assert told_by("") == "AttributeError: 'Bought' object has no attribute 'tell'"
    assert f"the worker {socket.gethostname()} runs another version of Cairn" in (other := told_by("# older"))
    assert f" (in {folder / 'runtime.zip'}) on the worker, " in other


def test_a_new_version_number_alone_does_not_change_the_runtime_version_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build writes the number beside the sources. Workers that had started before refused every task of a driver after it."""
    found = {}
    for changed in ("", "values/_version.py", "values/release.py"):

        def sources(changed: str = changed) -> Iterator[tuple[str, str, bytes]]:
            for name in ("values/_version.py", "values/release.py"):
                yield name, "", b"RELEASE = 1" if name == changed else b"RELEASE = 0"

        monkeypatch.setattr(shipping, "runtime_sources", sources)
        found[changed] = shipping.runtime_version.__wrapped__()
    assert found[""] == found["values/_version.py"] != found["values/release.py"]
    monkeypatch.undo()
    # The hash leaves the file out by its path, so the build must write the file there.
    setting = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools_scm"]["version_file"]
    assert setting == "state_backend/values/_version.py"


def test_modules_of_cairn_itself_are_not_shipped_as_user_modules() -> None:
    import cairn_operators  # noqa: F401 - a DAG's module has it
    import pipelines.aircraft  # noqa: F401

    found = find_user_code(["cairn.command.cli", "pipelines.aircraft", "cairn_operators", "pyspark.sql"]).modules
    assert [m.name for m in found] == ["pipelines", "pipelines.aircraft", "pipelines.land_flights"]


# --- the forms --------------------------------------------------------------------------------------------------------------


class Plain:
    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments, self.named = arguments, named

    def init(self, handle: Any) -> None: ...


def plain_of(argument: Any = 1) -> Plain:
    return Plain(argument)


@pytest.mark.parametrize(
    ("form", "arguments", "name"),
    [
        (Plain, (), "Plain"),
        (Plain([1]), ([1],), "Plain"),
        (partial(Plain, [1]), ([1],), "Plain"),
        (partial(partial(plain_of), 2), (2,), "plain_of"),
        (plain_of, (1,), "plain_of"),
        (lambda: plain_of(3), (3,), "<lambda>"),
    ],
    ids=["class", "instance", "partial", "partial of a function", "function", "lambda"],
)
def test_every_processor_form_makes_a_new_instance_each_time(form: Any, arguments: tuple[Any, ...], name: str) -> None:
    shipped = ship_processor(form, "p")
    made, another = processor_on_driver(form, "p"), shipped()
    assert made.arguments == another.arguments == arguments
    assert made is not another and made is not form
    assert all(a is not b for a, b in zip(made.arguments, another.arguments, strict=True) if isinstance(a, list))
    assert (shipped.name, name_of(form)) == (name, name)
    assert counting(processor=form).processor is form


def test_every_documented_form_makes_a_processor() -> None:
    """Each line of the block in the docs makes a processor, in a worker too."""
    text = (REPOSITORY / "docs" / "processors.md").read_text()
    block = text.partition("## Arguments and modules\n```python\n")[2].partition("```")[0]
    made = []
    for line in block.splitlines():
        scope = {**globals(), "Sessions": Plain, "gap": timedelta(hours=2), "prices": {"a": 1}}
        exec(line, scope)
        made.append(ship_processor(scope["processor"], "p")())
    assert [(p.arguments, p.named) for p in made] == [
        ((), {}),
        ((timedelta(hours=2), {"a": 1}), {}),
        ((), {"gap": timedelta(hours=1)}),
    ]


def test_no_zip_is_read_anew_for_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's own packages lie in zips on a worker's path; each of them kept its task 0.3 s from work."""
    archive = mock.Mock(zipimport.zipimporter)
    monkeypatch.setitem(sys.path_importer_cache, "pyspark.zip", archive)
    import_as_shipped([])
    archive.invalidate_caches.assert_not_called()


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (lambda: Plain, "returned the class Plain"),
        (lambda: None, "returned a NoneType"),
        (partial(int), "int returned a int"),
    ],
)
def test_a_factory_that_returns_no_processor_is_refused(form: Any, says: str) -> None:
    with pytest.raises(ProcessorError, match=f"pipeline 'p': .*{says}; it must return a processor"):
        processor_on_driver(form, "p")


def test_what_is_no_processor_is_refused_at_once() -> None:
    good: Pipeline = counting()
    with pytest.raises(
        UsageError, match=r"'counting': processor is a dict\nIt must be a StatefulProcessor's class, an"
    ):
        dataclasses.replace(good, processor={})  # type: ignore[arg-type]
    with code_of_one_call():
        assert ship_processor(Plain, "p") is ship_processor(Plain, "p")


def test_the_driver_plans_with_a_notebooks_own_class_and_a_copy_of_its_arguments() -> None:
    """A class of a notebook goes by value: were it loaded where it was made, its methods would see none of the notebook's later
    changes."""
    names: dict[str, Any] = {"__name__": "__main__", "LIMIT": 5}
    exec("class P:\n def init(self, handle): pass\n def tell(self): return LIMIT", names)
    planned = processor_on_driver(names["P"], "p")
    names["LIMIT"] = 6
    assert (type(planned), planned.tell()) == (names["P"], 6)

    given: list[int] = []
    processor_on_driver(lambda: Plain(given), "p").arguments[0].append(1)
    processor_on_driver(Plain(given), "p").arguments[0].append(1)
    assert given == []


# --- the hash ---------------------------------------------------------------------------------------------------------------

# Through stdin: in a notebook there is no file either. Equal values are in one line.
_VALUES = """
import collections, dataclasses, datetime, decimal, enum, functools, json, math, pathlib, re, uuid, zoneinfo
import numpy as np, pandas as pd
from pyspark.sql.types import *
from pyspark.accumulators import Accumulator, INT_ACCUMULATOR_PARAM
from pyspark.core.broadcast import Broadcast
from cairn.shipping.ship_processor import code_hash

@dataclasses.dataclass
class Point:
    x: int
    y: object = None

class Color(enum.Enum):
    RED, BLUE = 1, 2

class Slotted:
    __slots__ = ("a",)
    def __init__(self, a): self.a = a

def broadcast(value):
    made = Broadcast(path="")
    made._value = value
    return made

def adder(n):
    return lambda x: x + n

def defined(body, **names):
    scope = {"__name__": "__main__", **names}
    exec("class P:\\n def init(self, handle):\\n  " + body, scope)
    return scope["P"]

cyclic = [1]; cyclic.append(cyclic)
at, ny = datetime.datetime(2024, 11, 3, 1, 30), zoneinfo.ZoneInfo("America/New_York")
words = ["pear", "fig", "kiwi", "plum", "lime"]
schema = StructType([StructField("a", LongType()), StructField("b", ArrayType(StringType()))])
same = [
    [None], [True], [1], [1.0], [-0.0], [0.0], [math.nan, -math.nan], ["1"], [b"1"], [2**70], [1j], [...],
    [at], [at.replace(fold=1)], [at.replace(tzinfo=ny)], [at.replace(tzinfo=datetime.UTC)], [at.date()], [at.time()],
    [datetime.timedelta(days=1)], [decimal.Decimal("1.0")], [decimal.Decimal("1.00")], [uuid.UUID(int=5)], [ny],
    [Color.RED, Color(1)], [Color.BLUE], [(1, 2)], [[1, 2]], [[2, 1]], [cyclic],
    [{"a": 1, "b": 2}, {"b": 2, "a": 1}], [collections.OrderedDict(a=1, b=2)], [collections.OrderedDict(b=2, a=1)],
    [set(words), set(reversed(words))], [frozenset(words)], [{w: len(w) for w in set(words)}],
    [collections.defaultdict(list, {w: [1] for w in set(words)}), collections.defaultdict(list, {w: [1] for w in words})],
    [collections.deque([1, 2])], [Point(1), Point(1)], [Point(2)], [Slotted(1), Slotted(1)], [Slotted([1])],
    [np.int64(1)], [np.float32(1)], [np.arange(4), np.arange(8)[::2] // 2], [np.arange(4).reshape(2, 2)],
    [np.asfortranarray([[1, 2], [3, 4]]), np.array([[1, 2], [3, 4]])], [np.array(["a", None], object)],
    [pd.DataFrame({"a": [1, 2], "b": ["x", None]}), pd.DataFrame({"b": ["x", None], "a": [1, 2]})[["a", "b"]]],
    [pd.DataFrame({"a": [1, 3], "b": ["x", None]})], [pd.Series([1.5], name="s")], [pd.Timestamp(at)], [pd.NaT], [pd.NA],
    [pathlib.Path("/a"), pathlib.Path("/a/")], [pathlib.Path("/b")], [re.compile("a")], [re.compile("a", re.I)], [range(3)],
    [schema, StructType.fromJson(schema.jsonValue())], [StructType(schema.fields[:1])], [Row(a=1)], [Row(b=1)], [LongType()],
    [broadcast({"a": 1}), broadcast({"a": 1})], [broadcast({"a": 2})],
    [Accumulator(1, 0, INT_ACCUMULATOR_PARAM), Accumulator(2, 5, INT_ACCUMULATOR_PARAM)],
    [adder(1), adder(1)], [adder(2)], [lambda x: x], [functools.partial(adder, 1), functools.partial(adder, 1)],
    [functools.partial(adder, n=1)], [len], [json.dumps], [json], [str.join], [list[int]],
    [defined("pass"), defined("pass")], [defined("return 1")], [defined("return 2")], [defined("return len(handle)")],
    [defined("return LIMIT", LIMIT=1), defined("return LIMIT", LIMIT=1)], [defined("return LIMIT", LIMIT=2)],
    [defined("return help_it(1)", help_it=adder(1))], [defined("return help_it(1)", help_it=adder(3))],
    [defined("return handle.LIMIT", LIMIT=open("/dev/null")), defined("return handle.LIMIT")],
    [defined("import pipelines.weather")],
]
print(json.dumps([[code_hash(value, "p") for value in values] for values in same]))
"""


@pytest.mark.long("ten seconds: processes")
def test_equal_values_have_equal_hashes_in_every_process() -> None:
    environments = ({**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)} for seed in "12")
    first, second = (json.loads(python(["-"], _VALUES, environment)) for environment in environments)
    assert first == second
    assert [n for n, hashes in enumerate(first) if len(set(hashes)) != 1] == []
    different = [hashes[0] for hashes in first]
    assert [n for n, digest in enumerate(different) if different.index(digest) != n] == []


# A module whose values are hashed by what they hold. `{}` is 3 or 4.
_HELD = """
import contextlib, dataclasses, functools, pathlib, zoneinfo
from pyspark.sql.types import *

def made(n):
    rows = [1, 2]
    def inner(spark, interval):
        return {{k: [n for _ in range(k)] for k in rows if f"{{k:>{}}}"}}
    return inner

def classed():
    class Own:
        LIMIT = {}
        def init(self, handle):
            try:
                self.handle = handle
            finally:
                [x for x in handle]
    return Own

two = (lambda a: a + {}, lambda a: (lambda: a + {}))
@contextlib.contextmanager
def managed(): yield {}
VALUES = {{
    "inner": made({}), "class": classed(), "lambda": two[0], "outer lambda": two[1], "inner lambda": two[1](1),
    "wrapped": managed.__wrapped__, "partial": functools.partial(made, {}), "path": pathlib.Path("/data/{}"),
    "zone": zoneinfo.ZoneInfo("Etc/GMT-{}"), "bound": [{}].append, "schema": StructType([StructField("a", DecimalType({}))]),
}}
"""
_HASHES = {
    "inner": "39e735ce8297", "class": "bb9a7a8bff5a", "lambda": "30ee5d620b23", "outer lambda": "f1478f406b95",
    "inner lambda": "3f0a38278ae2", "wrapped": "cdbd5572a940", "partial": "eb70474f1f19", "path": "cfade882afc0",
    "zone": "2837fc4e3ed5", "bound": "b2e69050896d", "schema": "c7173dce3d89",
}  # fmt: skip


def _held_in(folder: Path, n: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (folder / "held.py").write_text(_HELD.replace("{}", str(n)).replace("{{", "{").replace("}}", "}"))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "held", raising=False)
    importlib.invalidate_caches()
    values: dict[str, Any] = importlib.import_module("held").VALUES
    found = {}
    for name, value in values.items():
        hasher = ValueHasher()
        found[name] = hasher.digest(value, "the processor").hex()[:12]
        assert not hasher.by_build
    return found


def test_hashes_are_the_same_in_every_version_of_python_and_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "3").mkdir()
    (tmp_path / "4").mkdir()
    found = _held_in(tmp_path / "3", 3, monkeypatch)
    assert found == _HASHES
    # Each of the values counts.
    other = _held_in(tmp_path / "4", 4, monkeypatch)
    assert [name for name in found if found[name] == other[name]] == []


def test_code_edited_after_its_import_is_not_hashed_by_its_source_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code made in a function is hashed by its text, and the file may have another text by now."""
    file = tmp_path / "edited.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def loaded(number: int) -> Any:
        file.write_text(f"def make():\n    def made():\n        return {number}\n    return made\nMADE = make()\n")
        monkeypatch.delitem(sys.modules, "edited", raising=False)
        importlib.invalidate_caches()
        return importlib.import_module("edited").MADE

    first = loaded(2)
    before = ValueHasher()
    of_text = before.digest(first, "the processor")
    second = loaded(9)
    assert (first(), second()) == (2, 9)
    after = ValueHasher()
    assert after.digest(first, "the processor") not in (of_text, ValueHasher().digest(second, "the processor"))
    assert not before.by_build and after.by_build == {"edited.make.<locals>.made has no source text"}


def test_code_without_source_text_is_named_and_hashed_with_what_it_reads() -> None:
    scope: dict[str, Any] = {"__name__": "__main__", "READ": 1}
    exec("def made(): return READ", scope)
    one, same, other = (ValueHasher().digest(scope["made"], "the processor") for scope["READ"] in (1, 1, 2))
    assert one == same != other
    processor = partial(Plain, scope["made"])
    assert ship_processor(processor, "p").by_build[0] == "__main__.made has no source text"

    def summed() -> int:
        one = 1
        return one + 1

    hasher = ValueHasher()
    hasher.digest(summed, "the processor")
    assert not hasher.by_build


class Holder(Plain):
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (lambda held: Holder(client=held), "the processor.client is a _thread.lock"),
        (lambda held: Holder(clients={"a": [held]}), r"the processor.clients\['a'\]\[0\] is a _thread.lock"),
        (lambda held: partial(Plain, 1, held), r"the processor.args\[1\] is a _thread.lock"),
        (lambda held: partial(Plain, given=held), r"the processor.keywords\['given'\] is a _thread.lock"),
        (lambda held: lambda: Plain(held), r"'held', which .*<lambda>.<locals>.<lambda> uses is a _thread.lock"),
        (lambda held: partial(Plain, (n for n in "ab")), r"the processor.args\[0\] is a generator"),
    ],
)
def test_the_error_names_the_part_of_a_processor_that_can_not_be_sent(form: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(UsageError, match=rf"^pipeline 'p': {says}. Cairn can't send it .*\nGive the processor plain"):
        ship_processor(form(threading.Lock()), "p")


def test_a_value_that_is_nested_too_deep_is_named() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(UsageError, match="is nested too deeply; give the processor a flatter value"):
        ValueHasher().digest(nested, "the processor.held")
    while nested:  # piece by piece: Python would free it by recursion
        nested = nested.pop()


# --- what a worker and a driver may not differ in, in this process ----------------------------------------------------------------


def shipped(**changes: Any) -> shipping.ShippedProcessor:
    named: dict[str, Any] = {"name": "Mine", "code_hash": "", "modules": (), "distributions": (), "broadcasts": ()}
    return shipping.ShippedProcessor(**named | {"by_reference": b"", "by_value": None, "no_value": ""} | changes)


def another_version() -> object:
    return shipping.unship(base64.b64encode(zlib.compress(cloudpickle.dumps(("0.0.1 (other)", b"")))).decode())


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (
            another_version,
            r"runs another version of Cairn than the driver: .* on the worker, 0.0.1 \(other\) on the driver\nInstall",
        ),
        (
            lambda: shipped(by_reference=b"cno_such_module\nMine\n.")._load(),
            "can't load the processor Mine: ModuleNotFoundError: No module named 'no_such_module'\nInstall",
        ),
        (
            lambda: shipping._check_installed(
                UserModule(name="json", kind="installed", digest="0" * 64, package="json 9")
            ),
            r"the module json differs between the worker .* on the worker, 000000000000 \(json 9\) on the driver\nInstall the same version",
        ),
        (
            lambda: shipping._check_distributions(
                [distributions.InstalledDistribution(name="pyarrow", version="0.1", digest="", is_pure=False)]
            ),
            r"the processor needs the package pyarrow, which differs .* on the worker, 0.1 \(no RECORD\) on the driver\nInstall",
        ),
    ],
)
def test_the_error_names_the_package_or_module_that_differs_on_a_worker(load: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load()


def test_a_module_that_is_gone_or_broken_is_named() -> None:
    gone = ModuleSpec("mine", None, origin="/nowhere/mine.py")
    with pytest.raises(
        UsageError, match=r"the module mine of the processor can no longer be read: .*No such file.*/nowhere/mine.py"
    ):
        bytes_of(gone)
    with pytest.raises(UsageError, match=r"the module mine of the processor can't be parsed: .*\nCorrect the file"):
        _find_imports(b"def (", "mine", "")


class ParsesWhenCollected:
    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        ast.parse("f(g(1))")


def test_a_finalizer_that_parses_code_disturbs_no_parse() -> None:
    """Before 3.11.8 it does: `ast.parse` itself fails in this loop. Finalizers of Py4J log exceptions, which parses code."""
    before, source = gc.get_threshold(), Path(__file__).read_bytes()
    gc.set_threshold(50, 2, 2)
    try:
        for _ in range(20):
            ParsesWhenCollected()
            assert parse_source(source).body
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled()
