"""Pages in Airflow's UI that show the checkpoints of pipelines. They read logs and change nothing.

plugin.py            registers the pages with Airflow
routes.py            is the FastAPI application; page_of_….py and pages_of_….py have the routes
shown_page.py        has what the pages share: the readers, and the values that each template needs
access.py            decides which pipelines and logs a user may read
airflow_database.py  reads DAGs and XComs from Airflow's database
database_runs.py     reads runs, tries, logs of tries, and DAGs that wait for assets, from Airflow's database
pipelines_of_dags.py finds the pipelines in DAGs and in the setting CAIRN_UI_PIPELINES
read_logs.py         reads and caches logs, with a limit on a page's wait
broken_since.py, waiting_dags.py, try_reason.py, run_bars.py, run_timeline.py
                     decide and compute what pages tell about runs
next_steps.py, error_pages.py        name the next step on empty pages, and answer errors with pages
pipeline_overview.py, checkpoint_actions.py, chain_graph.py, lineage_graph.py, log_pages.py, phases.py, trends.py,
trial_summary.py
                     compute what `state_backend.inspection` does not describe: labels, commands, places in a drawing
render_template.py   renders HTML from templates, over the values that the commands print with --json
data_docs.py, data_docs_routes.py    list and serve Data Docs in Airflow's UI
"""
