"""Parse Spark's DDL schemas, such as `"user string, at timestamp NOT NULL, seen array<struct<page: string>>"`.

The parser in this module needs no JVM. It does not know char, varchar, time, variant, intervals, collations, spatial
types and DEFAULT. A user can give a schema with one of these as a `StructType`.

Source: Spark's SqlBaseParser.g4, rules `colTypeList` and `dataType`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as t

from cairn.spark_versions import parser_of
from state_backend.values.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TOKEN = re.compile(
    r"\s*(?:(?P<quoted>`(?:[^`]|``)*`)|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<word>\w+)|(?P<sign>[<>(),:]))"
)
_ATOMIC: dict[str, Any] = {
    "boolean": t.BooleanType,
    "tinyint": t.ByteType,
    "byte": t.ByteType,
    "smallint": t.ShortType,
    "short": t.ShortType,
    "int": t.IntegerType,
    "integer": t.IntegerType,
    "bigint": t.LongType,
    "long": t.LongType,
    "float": t.FloatType,
    "real": t.FloatType,
    "double": t.DoubleType,
    "date": t.DateType,
    "timestamp": t.TimestampType,
    "timestamp_ltz": t.TimestampType,
    "timestamp_ntz": t.TimestampNTZType,
    "string": t.StringType,
    "binary": t.BinaryType,
    "void": t.NullType,
}


def parse_ddl_locally(ddl: str) -> t.StructType:
    return _Parser(ddl).schema()


class _Parser:
    def __init__(self, ddl: str) -> None:
        self._ddl = ddl
        self._at = 0
        # The kind and text of each token. The last token marks the end of the text.
        self._tokens: list[tuple[str, str]] = []
        end = 0
        while ddl[end:].strip():
            found = _TOKEN.match(ddl, end)
            if found is None:
                raise self._wrong(f"{ddl[end:].strip()[:20]!r} does not belong in a schema")
            self._tokens.append((str(found.lastgroup), found[str(found.lastgroup)]))
            end = found.end()
        self._tokens.append(("end", "the end"))

    def schema(self) -> t.StructType:
        fields = [] if self._tokens[0][0] == "end" else [self._field()]
        while self._takes(","):
            fields.append(self._field())
        if self._tokens[self._at][0] != "end":
            raise self._wrong(f"expected ',' or the end, found {self._tokens[self._at][1]!r}")
        return t.StructType(fields)

    def _field(self) -> t.StructField:
        kind, text = self._next()
        if kind not in ("word", "quoted"):
            raise self._wrong(f"expected a column's name, found {text!r}")
        name = text[1:-1].replace("``", "`") if kind == "quoted" else text
        self._takes(":")
        data_type, nullable, metadata = self._type(name), True, {}
        if self._takes("not"):
            self._expect("null")
            nullable = False
        if self._takes("comment"):
            kind, text = self._next()
            if kind != "text":
                raise self._wrong(f"expected a comment in quotes, found {text!r}")
            metadata = {"comment": re.sub(r"\\(.)", r"\1", text[1:-1])}
        return t.StructField(name, data_type, nullable, metadata)

    def _type(self, column: str) -> t.DataType:
        kind, text = self._next()
        name = text.lower()
        if kind == "word" and name in _ATOMIC:
            made: t.DataType = _ATOMIC[name]()
            return made
        if name in ("decimal", "dec", "numeric"):
            return self._decimal()
        if name == "array":
            self._expect("<")
            element = self._type(column)
            self._expect(">")
            return t.ArrayType(element)
        if name == "map":
            self._expect("<")
            key = self._type(column)
            self._expect(",")
            value = self._type(column)
            self._expect(">")
            return t.MapType(key, value)
        if name == "struct":
            self._expect("<")
            fields = [] if self._takes(">") else [self._field()]
            while fields and self._takes(","):
                fields.append(self._field())
            if fields:
                self._expect(">")
            return t.StructType(fields)
        raise self._wrong(
            f"column {column!r} has the type {text!r}, which Cairn can't parse without Spark\nKnown types: {', '.join(_ATOMIC)}, "
            "decimal, array, map and struct. For another type, pass a StructType"
        )

    def _decimal(self) -> t.DecimalType:
        numbers = []
        if self._takes("("):
            numbers.append(self._number())
            if self._takes(","):
                numbers.append(self._number())
            self._expect(")")
        return t.DecimalType(*numbers)

    def _number(self) -> int:
        _, text = self._next()
        if not text.isdecimal():
            raise self._wrong(f"expected a number, found {text!r}")
        return int(text)

    def _next(self) -> tuple[str, str]:
        token = self._tokens[self._at]
        if token[0] != "end":
            self._at += 1
        return token

    def _takes(self, wanted: str) -> bool:
        kind, text = self._tokens[self._at]
        if kind not in ("word", "sign") or text.lower() != wanted:
            return False
        self._at += 1
        return True

    def _expect(self, wanted: str) -> None:
        if not self._takes(wanted):
            raise self._wrong(f"expected {wanted!r}, found {self._tokens[self._at][1]!r}")

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"not a schema: {self._ddl!r}: {what}")


# Types that Spark's parser and the parser above read alike. Not `timestamp`, which depends on the session's settings.
_PLAIN = re.compile(
    r"(\s*[A-Za-z_]\w*\s+(boolean|tinyint|smallint|int|integer|bigint|long|float|double|date|timestamp_ntz|string|binary"
    r"|array<(boolean|tinyint|smallint|int|integer|bigint|long|float|double|date|timestamp_ntz|string|binary)>)\s*(,|$))+",
    re.ASCII | re.IGNORECASE,
)


def parse_ddl(spark: SparkSession, ddl: str) -> t.StructType:
    """Parse the columns of a DDL schema as Spark's own parser does.

    Columns of plain types, and of arrays of plain types, are parsed in this process. Spark parses any other text.
    """
    if _PLAIN.fullmatch(ddl) and not ddl.rstrip().endswith(","):
        return parse_ddl_locally(ddl)
    return parse_ddl_by_spark(spark, ddl)


def parse_ddl_by_spark(spark: SparkSession, ddl: str) -> t.StructType:
    """Parse the columns of a DDL schema with Spark's own parser, which costs a request to the server."""
    try:
        schema = parser_of(spark)(ddl)
    except UsageError:  # A test may put another parser in place of Spark's, which raises this error itself.
        raise
    except Exception as error:
        raise UsageError(f"not a schema: {ddl!r}: {str(error).strip().splitlines()[0]}") from error
    if not isinstance(schema, t.StructType):
        raise UsageError(
            f"not a schema of columns: {ddl!r}; write each column as name and type, as in 'user string, n long'"
        )
    return schema
