"""The program that Airflow's operators start."""
