"""Parse Python code, also while Python's garbage collector finds garbage."""

import ast
import gc


def parse_source(source: str | bytes) -> ast.Module:
    """Return the syntax tree of Python code. SyntaxError, ValueError: the source is no Python.

    Garbage is collected before or after, not meanwhile. Before Python 3.11.8 and 3.12.2, `ast.parse` raises SystemError
    if a finalizer parses code too (python/cpython#106905). Each finalizer that logs an exception does so.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collects:
            gc.enable()
