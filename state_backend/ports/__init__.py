"""Protocols for the services that the checkpoint code needs from outside; `adapters` implements them."""
