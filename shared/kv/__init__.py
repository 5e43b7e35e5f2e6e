"""KV arithmetic without devices: block hashes, layouts, the block pool, the arena."""
