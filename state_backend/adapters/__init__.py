"""Adapters of the ports: RocksDB, and storage on disk, in memory, on Google Cloud Storage and on S3."""
