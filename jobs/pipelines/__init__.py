"""The pipelines of this project: sources, processors and their declarations."""
