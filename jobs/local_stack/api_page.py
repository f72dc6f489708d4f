"""Show the names of `docs/api.md` to mkdocstrings, as an extension of Markdown for the docs site.

The page has these lines in a comment below each list of names, so that a reader of the repository does not see them:

    <!-- site
    ::: cairn.run_interval
    -->

The extension takes the lines out of the comment. At this place, mkdocstrings then shows docstring and arguments.
"""

from __future__ import annotations

import re
from typing import Any

from markdown import Extension, Markdown  # type: ignore[import-untyped]
from markdown.preprocessors import Preprocessor  # type: ignore[import-untyped]

_COMMENT = re.compile(r"<!-- site\n(.*?)-->\n", re.DOTALL)


class _ForSite(Preprocessor):  # type: ignore[misc]
    def run(self, lines: list[str]) -> list[str]:
        return _COMMENT.sub(r"\1", "\n".join(lines) + "\n").split("\n")


class ApiPage(Extension):  # type: ignore[misc]
    def extendMarkdown(self, md: Markdown) -> None:
        """Take the lines with names out of their comments, before any other extension reads the page."""
        md.preprocessors.register(_ForSite(md), "cairn_api_page", 1000)


def makeExtension(**settings: Any) -> ApiPage:
    """Return the extension. Python-Markdown calls this function of the module that zensical.toml names."""
    return ApiPage(**settings)
