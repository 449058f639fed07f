"""The cost model behind `bagu plan`: kernels, collectives, memory and step time of a layout; search and validation."""
