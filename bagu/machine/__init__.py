"""The computer: devices, fast dtypes, measured ceilings, timing, and C++ compiled on first use."""
