"""Pages in Airflow's UI that show the checkpoints of pipelines. They read logs and change nothing.

`plugin.py` registers the pages with Airflow. `routes.py` is the FastAPI application, whose routes are in `page_of_….py`
and `pages_of_….py`. The pages show what `state_backend.inspection` describes; the other modules add what only Airflow
knows, such as runs and rights, and what only a page needs, such as labels and places in a drawing.
"""
