"""Parse Python code, with a workaround for a bug of Python's `ast.parse` and garbage collector."""

import ast
import gc


def parse_source(source: str | bytes) -> ast.Module:
    """Return the syntax tree of Python code. Raise SyntaxError or ValueError if the source is no Python.

    The garbage collector is off during the parse. Before Python 3.11.8 and 3.12.2, `ast.parse` raises SystemError if
    the collector runs a finalizer that parses code too (python/cpython#106905), as one does that logs an exception.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collects:
            gc.enable()
