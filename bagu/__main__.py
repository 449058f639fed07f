"""`python -m bagu` is `bagu`."""

from bagu.cli import main

if __name__ == "__main__":
    main()
