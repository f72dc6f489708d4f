"""Prints the versions of requirements.lock except those of the packages that `pip install cairn-state[...]` names itself.

`make test-lowest` lets these packages be as old as pyproject.toml allows, and changes nothing else. Airflow, PySpark
and PyArrow stay as they are: `make test-versions` has older ones, and PyArrow 18 can't add a field to a struct.
"""

from __future__ import annotations

import re
import tomllib

from tests.support.layout import REPOSITORY

project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
named = [
    *project["dependencies"],
    *(one for extra in extras.keys() - {"airflow", "openlineage"} for one in extras[extra]),
]
lowest = {re.split(r"[\[>=<]", one)[0] for one in named} - {"pyspark", "pyarrow"}
for line in (REPOSITORY / "requirements.lock").read_text().splitlines():
    if "==" in line and line.partition("==")[0] not in lowest:
        print(line.removesuffix("\\"))
