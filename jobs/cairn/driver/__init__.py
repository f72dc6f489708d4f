"""The driver program that Airflow's operators start."""
