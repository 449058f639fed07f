"""`python -m bagu` is `bagu`."""

import signal

if __name__ == "__main__":
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends it without a traceback
    from bagu.cli import main

    signal.signal(signal.SIGINT, before)
    main()
