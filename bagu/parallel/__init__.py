"""Training over several processes (meshes, collectives, every kind of parallelism), and the planner of layouts."""
