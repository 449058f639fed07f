"""What an operator sees of the HTTP process: metrics, log lines, traces."""
