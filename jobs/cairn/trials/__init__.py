"""Trials: changed code that runs beside production before it is deployed."""
