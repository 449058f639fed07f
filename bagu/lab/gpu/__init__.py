"""Labs about kernels: fusion, tuning, occupancy, launches."""
