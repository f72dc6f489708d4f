"""Spark data sources that read state (`keyed_state`) and committed output (`keyed_output`)."""
