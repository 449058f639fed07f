"""`python -m bagu.serve.worker HOST PORT`: an engine for the server at this address (connect.py)."""

import sys

from bagu.serve.worker.connect import join

if __name__ == "__main__":
    join(sys.argv[1], int(sys.argv[2]))
