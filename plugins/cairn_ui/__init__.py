"""Pages in Airflow's UI that show the checkpoints of pipelines. They read logs and change nothing.

plugin.py            registers the pages with Airflow
routes.py            the FastAPI application
access.py            the pipelines that a user may read
airflow_database.py  DAGs, runs and XComs of Airflow's database
find_pipelines.py    the pipelines of DAGs and of the setting       pure
read_logs.py         reads logs, caches them, and times out
pipeline_overview.py, checkpoint_list.py, checkpoint_detail.py, lineage.py, trends.py, trials.py
                     contents of the pages                         pure
trial_rows.py        rows and entries in which a trial differs, read by a process of its own
human_units.py       sizes, durations and counts for people          pure
render_template.py   HTML from templates
data_docs.py, data_docs_routes.py    Data Docs in Airflow's frame
"""
