"""`python3 -m service`: see `service.cli`."""

import contextlib
import os
import signal
import sys

from service.cli import main

if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there are models to load again
    code = main(os.environ, sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or no reader any more
            stream.flush()
    os._exit(code)  # without waiting for threads that still load or compute
