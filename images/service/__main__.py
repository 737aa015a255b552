"""`python3 -m service`: see `service.cli`."""

import contextlib
import os
import sys

from service.cli import main

if __name__ == "__main__":
    code = main(os.environ)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or no reader any more
            stream.flush()
    os._exit(code)  # a thread may still load the model, or compute a result that is no longer wanted
