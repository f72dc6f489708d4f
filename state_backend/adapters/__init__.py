"""Adapters of the ports: storage on disk, in memory and on Google Cloud Storage, and RocksDB."""
