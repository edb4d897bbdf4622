"""Pictures of a schedule on one HTML page: graphs before and after, memory, pipeline stages and shards."""
