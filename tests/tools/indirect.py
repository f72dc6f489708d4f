"""Prints constraints for `make test-lowest`: requirements.lock without the direct dependencies of `cairn-state[...]`.

uv then installs their lowest versions. Airflow and PySpark stay locked, since `make test-versions` tests older ones.
PyArrow is at least 21, since older ones can't add a field to a struct.
"""

from __future__ import annotations

import re
import tomllib

from tests.support.layout import REPOSITORY

project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
asked = [project["dependencies"], *(extras[extra] for extra in extras.keys() - {"airflow", "openlineage"})]
lowest = {re.split(r"[\[>=<]", one)[0] for some in asked for one in some} - {"pyspark"}
for line in (REPOSITORY / "requirements.lock").read_text().splitlines():
    if "==" in line and line.partition("==")[0] not in lowest:
        print(line.removesuffix("\\"))
print("pyarrow>=21")
