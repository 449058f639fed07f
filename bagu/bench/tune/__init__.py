"""Search for the settings of a server: space, simulate, roofline (prediction), search, record, serve (the command)."""
