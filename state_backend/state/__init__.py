"""Keyed state of one shard: values, lists, maps, timers and expiry times in one sorted key space."""
