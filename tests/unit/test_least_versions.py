"""What `pyproject.toml` asks for fits beside what Airflow's own constraints and Spark's platforms pin."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement

from tests.support.layout import REPOSITORY

# What Airflow's constraints pin, for Python 3.11. They were read on: branch v3-1-test of 2026-02-17; main of 2026-03-28, days before 3.2.0;
# branch v3-3-test of 2026-08-05. Cairn's other packages are in none of them.
PINNED = {
    "3.1": """apache-airflow==3.1.7 apache-airflow-providers-celery==3.16.0 apache-airflow-providers-openlineage==2.10.2 azure-identity==1.25.2
        azure-storage-blob==12.28.0 boto3==1.42.49 celery==5.6.2 croniter==6.0.0 google-cloud-bigquery==3.40.1 google-cloud-storage==3.9.0
        google-crc32c==1.8.0 numpy==2.4.2 pandas==2.3.3 pyarrow==18.1.0 pydantic==2.12.5 pyspark==4.1.1 rich==13.9.4 typer==0.24.0
        typing-extensions==4.15.0""",
    "3.2": """apache-airflow==3.2.0 apache-airflow-providers-celery==3.17.1 apache-airflow-providers-openlineage==2.12.0 azure-identity==1.25.3
        azure-storage-blob==12.28.0 boto3==1.42.70 celery==5.6.2 croniter==6.2.2 google-cloud-bigquery==3.40.1 google-cloud-storage==3.10.1
        google-crc32c==1.8.0 numpy==2.4.3 pandas==2.3.3 pyarrow==23.0.1 pydantic==2.12.5 pyspark==4.1.1 rich==13.9.4
        typer==0.24.1 typing-extensions==4.15.0""",
    "3.3": """apache-airflow==3.3.2 apache-airflow-providers-celery==3.23.1rc1 apache-airflow-providers-openlineage==2.20.0rc2
        azure-identity==1.25.3 azure-storage-blob==12.30.0 boto3==1.43.56 celery==5.6.3 croniter==6.2.4 google-cloud-bigquery==3.42.3
        google-cloud-storage==3.13.0 google-crc32c==1.8.0 numpy==2.4.6 pandas==2.3.3 psycopg==3.3.4 pyarrow==25.0.0 pydantic==2.13.4
        rich==14.3.4 typer==0.27.0 typing-extensions==4.16.0""",
}


@pytest.mark.parametrize("airflow", PINNED)
def test_the_versions_that_airflow_pins_are_allowed_by_pyproject(airflow: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    asked = [Requirement(one) for one in listed]
    pins = dict(pin.split("==") for pin in PINNED[airflow].split())
    assert pins.keys() <= {one.name for one in asked}
    for one in asked:
        assert one.name not in pins or one.specifier.contains(pins[one.name], prereleases=True), (
            f"{one}: {pins[one.name]}"
        )
