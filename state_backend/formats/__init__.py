"""Durable bytes: one module per format, its layout drawn on top."""
