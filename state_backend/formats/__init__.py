"""Codecs of all durable bytes: one module per format, with a drawing of its layout at the top."""
