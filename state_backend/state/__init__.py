"""Keyed state of one shard: values, lists, maps, timers and expiry over one sorted key space."""
