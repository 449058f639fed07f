"""Training over several processes: meshes, launching, collectives, data parallelism, ZeRO."""
