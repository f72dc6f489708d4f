"""Example pipelines: their sources, processors and declarations, and the programs that write their input files."""
