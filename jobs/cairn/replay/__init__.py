"""Run one key of one committed interval again, in this process, and compare the result with the committed one.

No module of this package writes below a root.
"""
