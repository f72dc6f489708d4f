"""A whole Cairn on one machine: Airflow, its PostgreSQL and Spark Connect, as child processes of one program.

`make ui`, the demo, the soak test and the tests use this package. It belongs to the repository and is not part of the
wheel.
"""
