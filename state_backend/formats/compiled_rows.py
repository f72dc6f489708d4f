"""Compiler of row encoders and decoders. It writes loop-free code for one schema and runs the code with `exec`.

docs/design-state.md compares its time with that of `row_codec`'s loops ("State"). The loops handle all rows that the
compiled code does not: rows with a null, with a value of another type than the decoded type, damaged rows, and rows of
another version. So only the loops report errors.

For `(long, string, date)`, a row without nulls is stored in this order: 3 bytes `clean`, the long, the date, the length
of the string, the string. `clean` is the row's header (format and schema version) and its null bitmap, with no bit set.
All rows of this schema version without nulls begin with these bytes. The functions are

    def encode(row):
        if isinstance(row, SEQUENCES) and len(row) == 3:
            v0, v1, v2, = row
            if type(v0) is type0 and type(v1) is type1 and type(v2) is type2:
                try:
                    b1 = convert1(v1)
                    return pack(clean, v0, convert2(v2), len(b1)) + b1
                except UNFIT:
                    pass
        return otherwise(row)

    def decode(data):
        if data.startswith(clean):
            try:
                v0, v2, n1, = unpack(data)
                end = 19 + n1
                v1 = data[19:end]
                if end == len(data):
                    return (v0, convert1(v1), convert2(v2),)
            except UNDECODABLE:
                pass
        return otherwise(data)

`type0` is the Python type of the first column's decoded values, here `int`. `convert1` converts the value of the second
column, and is `str.encode` in `encode`, `bytes.decode` in `decode`. `otherwise` is the function with loops. `pack` and
`unpack` also handle the length of the first variable-width field, because it follows the fixed-width values directly.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from state_backend.formats.types import SEQUENCES, Misfit
from state_backend.values.frozen import frozen

UNFIT = (Misfit, struct.error, OverflowError, UnicodeEncodeError)
UNDECODABLE = (struct.error, ValueError, OverflowError, IndexError)
Convert = Callable[[Any], Any]


@frozen
class Column:
    """One field of a compiled row.

    Attributes:
        code: The field's code in Python's module `struct`; None for variable width.
        exact: The Python type of decoded values.
        to_physical: Converts a value of the type `exact` to the value that is stored: a number for `struct`, or bytes
            for variable width. None if the value is stored unchanged.
        to_python: Converts a stored value back to the type `exact`. None if the value is stored unchanged.
    """

    code: str | None
    exact: type
    to_physical: Convert | None
    to_python: Convert | None


def compiled_encoder(
    columns: Sequence[Column], clean: bytes, otherwise: Callable[[Any], bytes]
) -> Callable[[Any], bytes]:
    """Compile an encoder of rows, which returns the bytes of a row without nulls in one expression.

    Args:
        columns: The fields of the row, at least one.
        clean: The first bytes of each row that the compiled code writes: the row's header, and its null bitmap with no
            bit set.
        otherwise: The encoder for all other rows, such as rows with a null. It encodes or refuses them.
    """
    fixed, variable = _by_width(columns)
    lines = [f"{_names('b', [i])} = {_convert(columns[i].to_physical, i)}" for i in variable]
    parts = ["clean", *[_convert(columns[i].to_physical, i) for i in fixed]]
    packed = ", ".join([*parts, *[f"len(b{i})" for i in variable[:1]]])
    joined = [f"pack({packed})", *(f"b{i}" for i in variable[:1])]
    for i in variable[1:]:
        joined += [f"u32(len(b{i}))", f"b{i}"]
    result = " + ".join(joined) if len(joined) <= 2 else f"b''.join(({', '.join(joined)}))"
    tests = " and ".join(f"type(v{i}) is type{i}" for i in range(len(columns)))
    source = f"""
def encode(row):
    if isinstance(row, SEQUENCES) and len(row) == {len(columns)}:
        {_names("v", range(len(columns)))}, = row
        if {tests}:
            try:
{_block(lines, 16)}
                return {result}
            except UNFIT:
                pass
    return otherwise(row)
"""
    names = {"SEQUENCES": SEQUENCES, "UNFIT": UNFIT, "clean": clean, "otherwise": otherwise}
    names |= {"pack": _struct(columns, f"{len(clean)}s").pack, "u32": struct.Struct("<I").pack}
    names |= {f"type{i}": column.exact for i, column in enumerate(columns)}
    names |= {f"convert{i}": column.to_physical for i, column in enumerate(columns)}
    encode: Callable[[Any], bytes] = _made(source, "encode", names)
    return encode


def compiled_decoder(
    columns: Sequence[Column], clean: bytes, otherwise: Callable[[bytes], tuple[Any, ...]]
) -> Callable[[bytes], tuple[Any, ...]]:
    """Compile a decoder of rows. The compiled code decodes only rows that begin with `clean`: rows without nulls.

    Args:
        columns: The fields of the row. At least one has variable width.
        clean: The first bytes of each row without nulls of the current schema version: the row's header, and its null
            bitmap with no bit set.
        otherwise: The decoder for all other bytes, such as rows with a null and damaged rows. It decodes or refuses
            them.
    """
    fixed, variable = _by_width(columns)
    head = _struct(columns, f"{len(clean)}x")
    first, *others = variable
    lines = [f"end = {head.size} + n{first}", f"v{first} = data[{head.size}:end]"]
    for i in others:
        lines += ["begin = end + 4", "end = begin + u32(data, end)[0]", f"v{i} = data[begin:end]"]
    values = ", ".join(_convert(column.to_python, i) for i, column in enumerate(columns))
    source = f"""
def decode(data):
    if data.startswith(clean):
        try:
            {_names("v", fixed)}{", " if fixed else ""}n{first}, = unpack(data)
{_block(lines, 12)}
            if end == len(data):
                return ({values},)
        except UNDECODABLE:
            pass
    return otherwise(data)
"""
    names: dict[str, Any] = {"UNDECODABLE": UNDECODABLE, "clean": clean, "otherwise": otherwise}
    names |= {"unpack": head.unpack_from, "u32": struct.Struct("<I").unpack_from}
    names |= {f"convert{i}": column.to_python for i, column in enumerate(columns)}
    decode: Callable[[bytes], tuple[Any, ...]] = _made(source, "decode", names)
    return decode


def _by_width(columns: Sequence[Column]) -> tuple[list[int], list[int]]:
    every = range(len(columns))
    return [i for i in every if columns[i].code], [i for i in every if not columns[i].code]


def _struct(columns: Sequence[Column], head: str) -> struct.Struct:
    fixed, variable = _by_width(columns)
    return struct.Struct(f"<{head}{''.join(str(columns[i].code) for i in fixed)}{'I' if variable else ''}")


def _names(letter: str, numbers: Sequence[int]) -> str:
    return ", ".join(f"{letter}{i}" for i in numbers)


def _convert(convert: Convert | None, i: int) -> str:
    return f"v{i}" if convert is None else f"convert{i}(v{i})"


def _block(lines: Sequence[str], indent: int) -> str:
    return "\n".join(" " * indent + line for line in lines)


def _made(source: str, name: str, names: dict[str, Any]) -> Any:
    # The source contains numbers in place of the user's field names, so `exec` runs no text of the user.
    exec(source, names)
    return names[name]
