"""Looking inside kernels: compile them for sm_90 without a GPU (offline.py), and hold the code to rules (gate.py)."""
