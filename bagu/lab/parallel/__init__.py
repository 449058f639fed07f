"""Labs about many devices: collectives, shards, stages, layouts."""
