"""The command line of ``cairn.driver.driver``, as an operator writes it, and a driver that runs in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cairn.driver import driver
from state_backend.values.operation_parameters import Call, Request, to_json


def words_of(request: Request, **call: Any) -> list[str]:
    """The command line, without the file of the result. The local Spark, unless ``spark`` says another one."""
    return [request.command, to_json(request), "--call", to_json(Call(**{"spark": "local", **call}))]


def driven(request: Request, result: Path, **call: Any) -> dict[str, Any]:
    """Run the driver here, and return what it leaves in the file."""
    code = driver.main([*words_of(request, **call), "--result", str(result)])
    answer: dict[str, Any] = json.loads(result.read_text())
    assert (code == 0) == ("ok" in answer), answer
    return answer
