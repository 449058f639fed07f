"""What this computer is and what it can do: device, fast dtypes, ceilings, clocks, C++ built on the spot."""
