"""Find the input column that a pipeline's setting names, by Spark's rules for names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from pyspark.sql.types import StructType

from cairn.spark_versions import Grouping, connect_column, java_column
from state_backend.formats.types import StructType as Struct
from state_backend.formats.types import parse_struct, walk
from state_backend.values.errors import SourceError, UsageError
from state_backend.values.frozen import frozen

_QUOTED = re.compile(r"`((?:[^`]|``)*)`")
_WAY_OUT = (
    "Add the expression as a column in the source, as in rows.withColumn('user', F.upper('name')), and name that column"
)


@frozen
class ColumnNames:
    """The columns of some rows. Names are looked up by the rules of the Spark session. `what`: Begins messages."""

    names: tuple[str, ...]
    case_sensitive: bool
    what: str

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for name in self.names:
            folded = self.fold(name)
            if folded in seen:
                raise SourceError(
                    f"{self.what} has two columns {seen[folded]!r} and {name!r}, which Spark can't tell apart"
                    f"{'' if self.case_sensitive else ' (spark.sql.caseSensitive is false)'}; rename or drop one"
                )
            seen[folded] = name

    def find(self, name: str) -> str:
        """Return the name of a column as the rows spell it, for a name that may differ in case or have backticks.

        If no column has the name, it is returned unchanged, so that the caller can report it.
        """
        for wanted in (name, remove_quotes(name)):
            for own in self.names:
                if self.fold(own) == self.fold(wanted):
                    return own
        return name

    def find_key(self, key: Sequence[str]) -> list[str]:
        """Return the names of the key columns as the rows spell them."""
        own = [self.find(name) for name in key]
        missing = [name for name in own if name not in self.names]
        if missing:
            raise SourceError(
                f"{self.what} lacks the key column{'s' * (len(missing) > 1)} {', '.join(missing)}; "
                f"found: {', '.join(self.names)}"
            )
        if len({*own}) < len(own):
            raise UsageError(f"{self.what}: the key names a column twice: {', '.join(key)}")
        return own

    def spell(self, recorded: Iterable[str]) -> list[str]:
        """Return the own names, each spelled as the first recorded name that is equal but for case, if there is one."""
        spelling: dict[str, str] = {}
        for name in recorded:
            spelling.setdefault(self.fold(name), name)
        return [spelling.get(self.fold(name), name) for name in self.names]

    def fold(self, name: str) -> str:
        """Return a form of the name that is equal for all spellings of one column."""
        return name if self.case_sensitive else name.lower()


def check_spelling(schema: StructType, case_sensitive: bool, what: str, earlier: Iterable[str] = ()) -> None:
    """Raise `UsageError` if two names in one struct, or a column and a name in `earlier`, differ in case only.

    Nothing is checked if Spark is `case_sensitive`.
    """
    if case_sensitive:
        return
    for path, of in walk(parse_struct(schema.jsonValue())):
        seen: dict[str, str] = {}
        for name in of.names if isinstance(of, Struct) else ():
            other = seen.setdefault(name.lower(), name)
            if other != name:
                inside = f" in {path!r}" if path else ""
                raise UsageError(
                    f"{what} has two columns {other!r} and {name!r}{inside}, which differ in case only; rename one of them"
                )
    recorded = [*earlier]
    spelled = {name.lower(): name for name in recorded}
    for name in [name for name in schema.names if name not in recorded]:
        if name.lower() in spelled:
            raise UsageError(
                f"{what} has a column {name!r}, but earlier output spells it {spelled[name.lower()]!r}; spell it so, or rename it"
            )


def remove_quotes(name: str) -> str:
    """Return the name without Spark's backticks. A text that is not one quoted name is returned unchanged."""
    match = _QUOTED.fullmatch(name)
    return match[1].replace("``", "`") if match else name


def plain_name(column: Any, what: str) -> str:
    """Return the name of a column object (classic or Spark Connect); a string as it is. `what`: Begins messages."""
    if isinstance(column, str):
        return column
    parts = _parts(column)
    if len(parts) != 1:
        raise UsageError(f"{what}: {column} is not a plain column of the input\n{_WAY_OUT}")
    return parts[0]


def grouping_names(grouping: Grouping, what: str) -> list[str]:
    """Return the names of the columns by which `DataFrame.groupBy` has grouped."""
    names = [*map(_of_node if grouping.of_jvm else _parts, grouping.columns)]
    if grouping.kind.lower() != "groupby" or any(len(parts) != 1 for parts in names):
        raise UsageError(f"{what} must be grouped with groupBy, by plain columns only\n{_WAY_OUT}")
    return [parts[0] for parts in names]


def _parts(column: Any) -> list[str]:
    """Return the parts of a column's name: two for `s.x`, and an empty list for an expression."""
    node = java_column(column)
    if node is not None:
        return _of_node(node.expression() if node.getClass().getSimpleName() == "ExpressionColumnNode" else node)
    expression = connect_column(column)
    if type(expression).__name__ == "ColumnReference":
        name = expression.name()
        return [remove_quotes(name)] if "." not in name or remove_quotes(name) != name else name.split(".")
    return []


def _of_node(node: Any) -> list[str]:
    match node.getClass().getSimpleName():
        case "UnresolvedAttribute":
            parts = node.nameParts()
            return [parts.apply(i) for i in range(parts.size())]
        case "AttributeReference":
            return [node.name()]
    return []
