"""Where masters, gradients and optimizer state lie: one flat buffer (flat.py), its parts (sharded.py, divided.py)."""
