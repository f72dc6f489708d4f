"""Programs: the ``cairn`` command, and the driver that Airflow's operators start."""
