"""The parameter server: ranges of keys on servers with two copies each, exact pushes, bounded delay, no Ray needed."""
