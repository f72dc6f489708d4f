"""A whole Cairn on one machine: Airflow, its PostgreSQL and Spark Connect as processes of this folder, for `make ui`, the demo, the
soak and the tests. Belongs to the repository; a wheel does not bring it."""
