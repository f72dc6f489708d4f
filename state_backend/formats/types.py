"""Spark SQL types, parsed from `StructType.jsonValue()`, and the conversion of their Python values.

All codecs and the hash convert a user's Python value to a *physical* value first, and the physical value to bytes:

    type                                physical                        Python, when read back
    boolean                             bool                            bool
    byte short integer long             int                             int
    float double                        float                           float
    string | binary                     bytes (UTF-8 | unchanged)       str | bytes
    date                                int, days since 1970-01-01      date
    timestamp                           int, µs since 1970-01-01 UTC    naive datetime, wall time in `zone`
    timestamp_ntz                       int, µs since 1970-01-01        naive datetime
    decimal(p,s)                        int, unscaled                   Decimal with s fractional digits
    array<t> | map<k,v>                 list | list of (k, v)           list | dict
    struct                              tuple, in schema order          tuple, or an object of `struct_factory`

`to_physical` accepts values of the Python types above, makes the casts of the next table as Spark makes them, and
refuses all other values. For a refused value, Spark would store NULL or a wrong value without an error, and users would
notice months later. The casts are

    to              from
    string          bool ("true"), int, float (as Java writes it), Decimal
    binary          str, as UTF-8
    date            datetime, its day
    timestamp_ntz   aware datetime, its wall time
    decimal(p,s)    int, and Decimal rounded half up to s digits
    float double    int that is exact in this type

A naive datetime for a timestamp is wall time in `zone`. In the hour that clocks repeat in autumn, `fold` says which of
both instants is meant.
"""

from __future__ import annotations

import json
import operator
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta, tzinfo
from decimal import ROUND_HALF_UP, Context, Decimal, Inexact, InvalidOperation
from typing import Any

from state_backend.values.errors import InvariantViolated, StateSchemaError

Json = Any
Convert = Callable[[Any], Any]
StructFactory = Callable[[tuple[str, ...]], Callable[[tuple[Any, ...]], Any]]

MAX_LONG_DIGITS = 18  # the most digits of a decimal that fits an int64; Spark has the same limit
MAX_DIGITS = 38
SEQUENCES = (tuple, list)  # a constant, because `isinstance(x, tuple | list)` makes a new union object at every call
INTEGER_BITS = {"byte": 8, "short": 16, "integer": 32, "long": 64}
_SQL_NAMES = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint"}
_ATOMIC = {*INTEGER_BITS, "boolean", "float", "double", "string", "binary", "date", "timestamp", "timestamp_ntz"}


# --- Types. -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AtomicType:
    """A type without parameters, identified by its name in Spark's JSON."""

    name: str

    def __str__(self) -> str:
        return _SQL_NAMES.get(self.name, self.name)

    def to_json(self) -> Json:
        return self.name


@dataclass(frozen=True, slots=True)
class DecimalType:
    """A decimal type, with 1 <= precision <= 38 and 0 <= scale <= precision."""

    precision: int
    scale: int

    def __str__(self) -> str:
        return f"decimal({self.precision},{self.scale})"

    def to_json(self) -> Json:
        return str(self)


@dataclass(frozen=True, slots=True)
class ArrayType:
    element: DataType
    contains_null: bool = True

    def __str__(self) -> str:
        return f"array<{self.element}>"

    def to_json(self) -> Json:
        return {"type": "array", "elementType": self.element.to_json(), "containsNull": self.contains_null}


@dataclass(frozen=True, slots=True)
class MapType:
    key: DataType
    value: DataType
    value_contains_null: bool = True

    def __str__(self) -> str:
        return f"map<{self.key}, {self.value}>"

    def to_json(self) -> Json:
        key, value = self.key.to_json(), self.value.to_json()
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": self.value_contains_null}


@dataclass(frozen=True, slots=True)
class UnsupportedType:
    """A Spark type that neither state nor keys can hold.

    The parser keeps the type instead of raising, because the code that later refuses the type knows the field's name.

    Attributes:
        why: The reason, which completes "can't be stored: …".
    """

    name: str
    why: str
    json_text: str

    def __str__(self) -> str:
        return self.name

    def to_json(self) -> Json:
        return json.loads(self.json_text)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a struct. Equality ignores the metadata (comments, defaults)."""

    name: str
    type: DataType
    nullable: bool = True
    metadata: Mapping[str, Json] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True, slots=True)
class StructType:
    """A struct type, or the schema of a row."""

    fields: tuple[Field, ...]

    def __str__(self) -> str:
        return f"struct<{', '.join(map(str, self.fields))}>"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.fields)

    def to_json(self) -> Json:
        """Return Spark's `jsonValue()` of the struct: the inverse of `parse_struct`."""
        return {
            "type": "struct",
            "fields": [
                {"name": f.name, "type": f.type.to_json(), "nullable": f.nullable, "metadata": dict(f.metadata)}
                for f in self.fields
            ],
        }


DataType = AtomicType | DecimalType | ArrayType | MapType | StructType | UnsupportedType


def parse_struct(json_value: Mapping[str, Json]) -> StructType:
    """Parse Spark's `StructType.jsonValue()`.

    Types that can't be stored become `UnsupportedType`, which the codecs refuse.

    Raises:
        StateSchemaError: The JSON is no struct's, is nested too deeply, or names a field twice.
    """
    try:
        parsed = _parse(json_value, "", {})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise StateSchemaError(f"not a Spark struct type in JSON ({error!r}): {shorten(json_value)}") from error
    except RecursionError:
        raise StateSchemaError("a schema is nested too deeply") from None
    if not isinstance(parsed, StructType):
        raise StateSchemaError(f"a schema must be a Spark struct type in JSON; found {shorten(json_value)}")
    return parsed


def _parse(value: Json, path: str, collations: Mapping[str, str]) -> DataType:
    """Parse a type.

    Spark writes a string type with a collation as just "string". The collation is in the metadata of the nearest field
    above, under the path from this field (`name`, `name.element`, `name.key`).

    Source: Spark's DataType.parseDataType.
    """
    if isinstance(value, str):
        if value == "string" and path in collations:
            return _explain_unsupported(f"string collate {collations[path]}", value)
        if value in _ATOMIC:
            return AtomicType(value)
        if match := re.fullmatch(r"decimal\(([0-9]{1,3}),([0-9]{1,3})\)", value):
            precision, scale = int(match[1]), int(match[2])
            if 1 <= precision <= MAX_DIGITS and scale <= precision:
                return DecimalType(precision, scale)
        return _explain_unsupported(value, value)
    kind = value["type"]
    if kind == "array":
        return ArrayType(_parse(value["elementType"], f"{path}.element", collations), value["containsNull"])
    if kind == "map":
        key, of = _parse(value["keyType"], f"{path}.key", collations), value["valueType"]
        return MapType(key, _parse(of, f"{path}.value", collations), value["valueContainsNull"])
    if kind == "struct":
        fields = tuple(_parse_field(f) for f in value["fields"])
        if len({f.name for f in fields}) < len(fields):
            raise StateSchemaError(f"two fields share a name: {', '.join(f.name for f in fields)}")
        return StructType(fields)
    return _explain_unsupported(str(kind), value)


def _parse_field(value: Json) -> Field:
    name, metadata = value["name"], value.get("metadata") or {}
    if not isinstance(name, str) or not isinstance(value["nullable"], bool):
        raise TypeError(f"field {shorten(name)}")
    return Field(name, _parse(value["type"], name, metadata.get("__COLLATIONS", {})), value["nullable"], metadata)


def _explain_unsupported(name: str, value: Json) -> UnsupportedType:
    why = "it is not a type that state can hold"
    if "collate" in name:
        why = "strings that differ in bytes may be equal under a collation; use STRING without collation, in lower case if needed"
    elif name.startswith("interval"):
        why = "intervals have no single unit; use BIGINT, for example for microseconds"
    elif name == "variant":
        why = "equal variants may differ in bytes; use STRING with JSON, or a struct"
    elif name.startswith(("char", "varchar")):
        why = "Cairn neither pads it nor checks its length; use STRING"
    elif name == "udt":
        why = "a reader would need its Python class; use its sqlType"
    return UnsupportedType(name, why, json.dumps(value))


def names_and_types(data_type: DataType) -> DataType:
    """Return the type with all parts nullable and without comments.

    Two key schemas with equal results have the same key groups and the same bytes for every key.
    """
    match data_type:
        case ArrayType(element):
            return ArrayType(names_and_types(element))
        case MapType(key, value):
            return MapType(names_and_types(key), names_and_types(value))
        case StructType(fields):
            return StructType(tuple(Field(f.name, names_and_types(f.type)) for f in fields))
    return data_type


def with_nulls_of(data_type: DataType, other: DataType) -> DataType:
    """Return the type with more nullable parts: each part that is nullable in `data_type` or in `other`.

    Both must have equal `names_and_types`, except for the case of names.
    """
    match data_type, other:
        case ArrayType(element, contains_null), ArrayType(of, may_be_null):
            return ArrayType(with_nulls_of(element, of), contains_null or may_be_null)
        case MapType(key, value, contains_null), MapType(of_key, of, may_be_null):
            return MapType(with_nulls_of(key, of_key), with_nulls_of(value, of), contains_null or may_be_null)
        case StructType(fields), StructType(others):
            return StructType(
                tuple(
                    replace(f, type=with_nulls_of(f.type, o.type), nullable=f.nullable or o.nullable)
                    for f, o in zip(fields, others, strict=True)
                )
            )
    return data_type


def walk(data_type: DataType, path: str = "") -> Iterator[tuple[str, DataType]]:
    """Yield the type and all types inside it, each with its dotted path: `a`, `a.element`, `a.key`, `a.b`."""
    yield path, data_type
    dot = f"{path}." if path else ""
    if isinstance(data_type, ArrayType):
        yield from walk(data_type.element, f"{dot}element")
    elif isinstance(data_type, MapType):
        yield from walk(data_type.key, f"{dot}key")
        yield from walk(data_type.value, f"{dot}value")
    elif isinstance(data_type, StructType):
        for f in data_type.fields:
            yield from walk(f.type, f"{dot}{f.name}")


# --- Conversion of Python values to physical values. ------------------------------------------------------------------


class Misfit(TypeError):
    """A value does not fit its type.

    The error collects the path of the value (`.b[3].key`) while it propagates. The codecs turn it into the error that
    users see.

    Attributes:
        text: The end of the message, which follows the path directly.
        path: The path of the value within the row.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.path = ""

    def at(self, step: str) -> Misfit:
        """Put one more step, such as `.b` or `[3]`, before the path of the value, and return this error."""
        self.path = step + self.path
        return self

    def message(self, owner: str, member: str) -> str:
        """Return the message for users, such as `state 'x' field 'a.b': expected bigint, found str 'y'`.

        Args:
            owner: The beginning of the message, such as "state 'x'".
            member: The word for a field, such as "field".
        """
        return f"{owner}{f' {member} {self.path[1:]!r}' if self.path else ''}{self.text}"


def shorten(value: object, most: int = 80) -> str:
    """Return the value's repr, cut to at most `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _misfit(expected: object, value: object, why: str = "") -> Misfit:
    return Misfit(f": expected {expected}, found {type(value).__name__} {shorten(value)}{f' ({why})' if why else ''}")


def _plain(value: Any) -> Any:
    """Convert NumPy scalars and arrays to Python values, and return other values unchanged.

    Source: pyspark's `_normalize_state_value`.
    """
    return value.tolist() if hasattr(value, "tolist") else value


def to_physical(data_type: DataType, zone: tzinfo = UTC) -> Convert:
    """Return a function that converts a user's Python value to its physical value: the value that codecs store.

    Examples of physical values: days since 1970 for a date, microseconds since 1970 for a timestamp, UTF-8 bytes for a
    string, the unscaled integer for a decimal, a list of (key, value) for a map. The codecs encode them to bytes.

    Args:
        data_type: The type of the value.
        zone: The zone of naive datetimes for a timestamp.

    Raises:
        Misfit: The returned function gets None or a value that does not fit.
    """
    match data_type:
        case AtomicType(name) if name in INTEGER_BITS:
            return _from_int(data_type, INTEGER_BITS[name])
        case AtomicType("float" | "double"):
            return _from_float(data_type)
        case AtomicType("timestamp"):
            return _from_instant(data_type, zone)
        case AtomicType(name):
            return {
                "boolean": _from_bool,
                "string": _from_str,
                "binary": _from_bytes,
                "date": _from_date,
                "timestamp_ntz": _from_wall_time(data_type),
            }[name]
        case DecimalType():
            return _from_decimal(data_type)
        case ArrayType():
            return _from_array(data_type, zone)
        case MapType():
            return _from_map(data_type, zone)
        case StructType():
            convert = row_to_physical(data_type, zone, nested=True)
            return lambda value: tuple(convert(value))
        case UnsupportedType():
            raise InvariantViolated(f"{data_type} can't be stored; the codec should have refused it")


def _from_bool(value: Any) -> bool:
    if value is True or value is False:
        return value
    plain = _plain(value)
    if isinstance(plain, bool):
        return plain
    raise _misfit("boolean", value)


def _from_int(expected: DataType, bits: int) -> Convert:
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1

    def convert(value: Any) -> int:
        exact = value
        if type(exact) is not int:
            exact = _plain(exact)
            if not isinstance(exact, int) or isinstance(exact, bool):
                raise _misfit(expected, value)
            exact = operator.index(exact)
        if low <= exact <= high:
            return exact
        raise _misfit(expected, value, "out of range")

    return convert


def _from_float(expected: AtomicType) -> Convert:
    single = struct.Struct("<f").pack if expected.name == "float" else None

    def convert(value: Any) -> float:
        exact = value
        if type(exact) is not float:
            exact = _plain(exact)
            if isinstance(exact, bool) or not isinstance(exact, float | int):
                raise _misfit(expected, value)
            if isinstance(exact, int):
                exact = _widen(expected, exact)
            exact = float(exact)
        if single is not None:
            try:
                single(exact)
            except OverflowError:
                # The JVM would store infinity for a double that is too large for a float.
                raise _misfit(expected, value, "out of range") from None
        return exact

    return convert


def _widen(expected: AtomicType, value: int) -> float:
    """Return the float that equals an int. Raise `Misfit` if no number of the type `expected` equals it."""
    try:
        widened = float(value)
        if expected.name == "float":
            widened = struct.unpack("<f", struct.pack("<f", widened))[0]
    except OverflowError:
        widened = float("inf")
    if widened != value:
        raise _misfit(expected, value, "not exact in this type")
    return widened


def _from_str(value: Any) -> bytes:
    # `str.encode` gives the text of a subclass such as np.str_ or an enum; str(value) may be the name of the enum's
    # member.
    if isinstance(value, str):
        try:
            return str.encode(value)
        except UnicodeEncodeError:
            raise _misfit("string", value, "it has a lone surrogate, which UTF-8 can't encode") from None
    plain = _plain(value)
    if isinstance(plain, bool):
        return b"true" if plain else b"false"
    if isinstance(plain, int):
        return int.__repr__(plain).encode()
    if isinstance(plain, float):
        return java_text(plain).encode()
    if isinstance(plain, Decimal) and plain.is_finite():
        return str(plain).encode()
    raise _misfit("string", value)


def java_text(value: float) -> str:
    """Format a double like Java's `Double.toString`: shortest digits, scientific notation below 10^-3 and from 10^7 on.

    Source: JDK 19 and later. Older JDKs write one more digit for some values.
    """
    if value != value:  # noqa: PLR0124
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits)).rstrip("0") or "0"
    point = len(digits) + exponent  # the value is 0.text × 10^point
    prefix = "-" if sign else ""
    if text == "0":
        return f"{prefix}0.0"
    if -3 < point <= 7:
        whole = text[:point].ljust(point, "0") if point > 0 else "0"
        rest = text[point:] if point > 0 else "0" * -point + text
        return f"{prefix}{whole}.{rest or '0'}"
    return f"{prefix}{text[0]}.{text[1:] or '0'}E{point - 1}"


def _from_bytes(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return _from_str(value)
    raise _misfit("binary", value)


_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_DATETIME_US = (datetime.max - _EPOCH) // timedelta(microseconds=1)
_MIN_DATETIME_US = (datetime.min - _EPOCH) // timedelta(microseconds=1)


def _from_date(value: Any) -> int:
    plain = value if type(value) is date else _plain(value)
    if isinstance(plain, date) and plain == plain:  # noqa: PLR0124 - NaT differs from itself
        return plain.toordinal() - _EPOCH_ORDINAL
    raise _misfit("date", value)


def _from_instant(expected: AtomicType, zone: tzinfo) -> Convert:
    naive_is_utc = zone is UTC

    def convert(value: Any) -> int:
        exact = value
        if type(exact) is not datetime:
            exact = _plain_datetime(expected, value)
        if exact.tzinfo is None:
            if naive_is_utc:
                return _micros(exact - _EPOCH)
            exact = exact.replace(tzinfo=zone)
        elif exact.utcoffset() is None:
            raise _misfit(expected, value)
        micros = _micros(exact - _EPOCH_UTC)
        # 0001-01-01 in a zone east of Greenwich is in the year 0 in UTC, which a datetime can't represent.
        if _MIN_DATETIME_US <= micros <= _MAX_DATETIME_US:
            return micros
        raise _misfit(expected, value, "out of range in UTC")

    return convert


def _from_wall_time(expected: AtomicType) -> Convert:
    def convert(value: Any) -> int:
        exact = value
        if type(exact) is not datetime:
            exact = _plain_datetime(expected, value)
        return _micros((exact if exact.tzinfo is None else exact.replace(tzinfo=None)) - _EPOCH)

    return convert


def _micros(delta: timedelta) -> int:
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def _plain_datetime(expected: DataType, value: Any) -> datetime:
    """Convert pandas' and pendulum's datetimes, which have their own subtraction, to plain datetimes.

    Nanoseconds are dropped, as in PySpark.
    """
    plain = _plain(value)
    if not isinstance(plain, datetime) or plain != plain:  # noqa: PLR0124
        raise _misfit(expected, value)
    at = (plain.year, plain.month, plain.day, plain.hour, plain.minute, plain.second, plain.microsecond)
    return datetime(*at, tzinfo=plain.tzinfo, fold=plain.fold)


# The precision is twice the 38 digits of the widest decimal: no product with a power of ten needs more. EXACT raises
# an error instead of rounding, and _ROUNDED rounds half up.
EXACT = Context(prec=2 * MAX_DIGITS, traps=[Inexact, InvalidOperation])
_ROUNDED = Context(prec=2 * MAX_DIGITS, rounding=ROUND_HALF_UP, traps=[InvalidOperation])


def _from_decimal(expected: DecimalType) -> Convert:
    scale, limit, unit = expected.scale, 10**expected.precision, Decimal(1).scaleb(-expected.scale)

    def convert(value: Any) -> int:
        exact = value
        if type(exact) is not Decimal:
            exact = _plain(exact)
            if isinstance(exact, bool) or not isinstance(exact, Decimal | int):
                raise _misfit(expected, value)
            exact = Decimal(exact)
        try:
            # `quantize` raises an error for a number with more digits than the context has. Without `quantize`,
            # `int` of Decimal("1E+999999999") would fill the memory with a billion digits.
            unscaled = int(exact.quantize(unit, context=_ROUNDED).scaleb(scale, EXACT))
        except (ArithmeticError, ValueError):
            unscaled = limit
        if -limit < unscaled < limit:
            return unscaled
        raise _misfit(expected, value, "out of range")

    return convert


def _from_array(expected: ArrayType, zone: tzinfo) -> Convert:
    convert_element, nullable = to_physical(expected.element, zone), expected.contains_null

    def convert(value: Any) -> list[Any]:
        items = value if isinstance(value, SEQUENCES) else _plain(value)
        if not isinstance(items, SEQUENCES):
            raise _misfit(expected, value)
        physical: list[Any] = []
        try:
            for item in items:
                physical.append(None if item is None and nullable else convert_element(item))
        except Misfit as misfit:
            raise misfit.at(f"[{len(physical)}]") from None
        return physical

    return convert


def _from_map(expected: MapType, zone: tzinfo) -> Convert:
    convert_key, convert_value = to_physical(expected.key, zone), to_physical(expected.value, zone)
    nullable = expected.value_contains_null

    def convert(value: Any) -> list[tuple[Any, Any]]:
        if not isinstance(value, dict):
            raise _misfit(expected, value)
        step, physical = ".key", []
        try:
            for key, item in value.items():
                step = ".key"
                first = convert_key(key)
                step = ".value"
                physical.append((first, None if item is None and nullable else convert_value(item)))
        except Misfit as misfit:
            raise misfit.at(step) from None
        if len({key for key, _ in physical}) < len(physical):
            raise _misfit(expected, value, "two keys have the same stored value")
        return physical

    return convert


_PANDAS_NULLS = ("NaTType", "NAType")


def row_to_physical(expected: StructType, zone: tzinfo = UTC, *, nested: bool = False) -> Callable[[Any], list[Any]]:
    """Return a function that converts a user's row to the list of its physical values: the values that codecs store.

    Examples of physical values: days since 1970 for a date, UTF-8 bytes for a string. The returned function reads a
    dict by name, and other rows by position.

    Args:
        expected: The schema of the row.
        zone: The zone of naive datetimes for timestamps.
        nested: False for a whole row: a dict or any other iterable. True for a struct inside a row: a dict, a tuple, a
            list, a PySpark Row, a NumPy array, or an object with the fields' names as attributes.

    Raises:
        Misfit: The returned function gets a value that is no row of this schema.
    """
    converts = [to_physical(f.type, zone) for f in expected.fields]
    nullables = [f.nullable for f in expected.fields]
    names, size = expected.names, len(expected.fields)

    def convert(value: Any) -> list[Any]:
        values = value if isinstance(value, SEQUENCES) else _positional(expected, value, nested)
        if len(values) != size:
            raise Misfit(f" has {size} field{'s' * (size != 1)} ({', '.join(names)}); got {len(values)} values")
        try:
            # The lengths were compared above, and `strict=True` would take a sixth of the conversion's time.
            return [None if v is None and n else c(v) for v, n, c in zip(values, nullables, converts)]  # noqa: B905
        except Misfit:
            # The row may contain pandas' own nulls. For speed, the code searches for these only after a value did not
            # fit.
            if any(type(v).__name__ in _PANDAS_NULLS for v in values):
                return convert([None if type(v).__name__ in _PANDAS_NULLS else v for v in values])
            for name, v, n, c in zip(names, values, nullables, converts, strict=True):
                try:
                    if v is not None or not n:
                        c(v)
                except Misfit as misfit:
                    if v is None:
                        misfit.text += " (the field is not nullable)"
                    raise misfit.at(f".{name}") from None
            raise

    return convert


def _positional(expected: StructType, value: Any, nested: bool) -> Sequence[Any]:
    """Return the values, in schema order, of a row that is neither tuple nor list.

    A field that a dict lacks is null, as in PySpark. A key of a dict that is no field is refused as a typo.
    """
    if isinstance(value, dict):
        if unknown := set(value) - set(expected.names):
            raise _misfit(expected, value, f"no such field: {', '.join(sorted(map(repr, unknown)))}")
        return [value.get(name) for name in expected.names]
    if hasattr(value, "__fields__"):
        return tuple(value)
    plain = _plain(value)
    if not nested:
        # Spark accepts any iterable as a row, so a bare string is a row of its characters here too.
        try:
            return list(plain)
        except TypeError:
            raise _misfit(expected, value) from None
    if isinstance(plain, list):
        return plain
    attributes = getattr(value, "__dict__", None)
    if attributes and attributes.keys() >= set(expected.names):
        return [attributes[name] for name in expected.names]
    raise _misfit(expected, value)


# --- Conversion of physical values to Python values. ------------------------------------------------------------------


def to_python(data_type: DataType, struct_factory: StructFactory | None = None, zone: tzinfo = UTC) -> Convert | None:
    """Return a function that converts a physical value, as codecs store it, back to the user's Python value.

    Examples of physical values: days since 1970 for a date, UTF-8 bytes for a string. The returned function must not
    get None. It raises ValueError or OverflowError for a value that `to_physical` never returns.

    Args:
        data_type: The type of the value.
        struct_factory: `struct_factory(names)(values)` makes nested structs; None for tuples.
        zone: The time zone of the naive datetimes that timestamps become.

    Returns:
        The function; None if the physical value is the Python value already.
    """
    match data_type:
        case AtomicType("string"):
            return bytes.decode
        case AtomicType("date"):
            return lambda days: date.fromordinal(days + _EPOCH_ORDINAL)
        case AtomicType("timestamp") if zone is not UTC:
            return _to_wall_time(zone)
        case AtomicType("timestamp" | "timestamp_ntz"):
            return lambda micros: _EPOCH + timedelta(0, 0, micros)
        case DecimalType():
            return _to_decimal(data_type)
        case ArrayType():
            element = to_python(data_type.element, struct_factory, zone)
            if element is None:
                return None
            return lambda items: [None if item is None else element(item) for item in items]
        case MapType():
            key = to_python(data_type.key, struct_factory, zone) or same
            value = to_python(data_type.value, struct_factory, zone) or same
            return lambda pairs: {key(k): None if v is None else value(v) for k, v in pairs}
        case StructType():
            converts = [to_python(f.type, struct_factory, zone) or same for f in data_type.fields]
            make = struct_factory(data_type.names) if struct_factory else same
            return lambda values: make(
                tuple([None if v is None else c(v) for v, c in zip(values, converts, strict=True)])
            )
    return None


def _to_wall_time(zone: tzinfo) -> Convert:
    def convert(micros: int) -> datetime:
        instant = _EPOCH_UTC + timedelta(0, 0, micros)
        try:
            return instant.astimezone(zone).replace(tzinfo=None)
        except OverflowError:
            # Users write 9999-12-31 23:59:59 UTC for "for ever". East of Greenwich this instant is in the year 10000,
            # so the largest datetime stands for it.
            return datetime.max if micros > 0 else datetime.min

    return convert


def _to_decimal(data_type: DecimalType) -> Convert:
    exponent, limit = -data_type.scale, 10**data_type.precision

    def convert(unscaled: int) -> Decimal:
        if -limit < unscaled < limit:
            return Decimal(unscaled).scaleb(exponent, EXACT)
        raise ValueError(f"{unscaled} has more than {data_type.precision} digits")

    return convert


def same(value: Any) -> Any:
    return value
