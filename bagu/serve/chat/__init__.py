"""Chat in a terminal, with a server over HTTP or an engine in this process."""
