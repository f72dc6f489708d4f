"""Adapters: RocksDB, and the storage port on disk, in memory, on Google Cloud Storage, on S3 and on Azure."""
