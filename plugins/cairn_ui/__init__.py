"""Checkpoints in Airflow's UI: pages that read the logs of pipelines and change nothing.

found.py         which pipelines the DAGs and the setting name           pure
rights.py        whom Airflow lets read which of them
airflow_side.py  what Airflow's database says of a DAG and its runs
reading.py       reads logs, keeps them, and gives up in time
glance.py, history.py, lineage.py, trends.py, detail.py    what a page shows, as values    pure
words.py         sizes, spans and counts in units that people read       pure
pages.py         templates
routes.py        the FastAPI application
docs.py          Data Docs, in the same frame
plugin.py        what Airflow loads
"""
