"""Files of one shard: manifests, snapshots, segments, restores, consolidation and transfer."""
