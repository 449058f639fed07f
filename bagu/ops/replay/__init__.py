"""The recorded launch: host code is recorded (record.py) as a plan (plan.py), which later calls replay (replay.py)."""
