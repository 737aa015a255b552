"""Ctrl-C at a chosen moment: KeyboardInterrupt before the n-th bytecode that the runtime runs."""

import os
import sys

# of the bytecodes of a test, so many are passed over for one that is interrupted
PASSED_OVER = 0 if os.environ.get("ALL_BYTECODES") else 20
OURS = ("/probes/placement/runtime/", "/probes/placement/loading/")


class Interruption:
    """Counts the bytecodes of our files while `work` runs, and interrupts it before number `at`."""

    def __init__(self, at=None):
        self.at, self.seen, self.where = at, 0, []

    def _call(self, frame, _event, _argument):
        if not any(part in frame.f_code.co_filename for part in OURS) or _is_finalizer(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame, event, _argument):
        if event == "opcode":
            if self.at is None:
                self.where.append((frame.f_code, frame.f_lineno, frame.f_lasti))
            elif self.seen == self.at:
                self.where.append(f"{frame.f_code.co_qualname}, line {frame.f_lineno}, byte {frame.f_lasti}")
                raise KeyboardInterrupt(self.where[-1])
            self.seen += 1
        return self._opcode

    def run(self, work):
        """Whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def _is_finalizer(frame):
    """Whether it is called by `__del__`, whose errors Python only reports."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def moments(work, *, thorough=False):
    """Interruptions at each line of `work` when it comes last; `thorough`: at some bytecodes, first, too.

    With ALL_BYTECODES in the environment, at each, which takes minutes.
    """
    whole = Interruption()
    whole.run(work)
    first, last = {}, {}
    for at, (code, line, byte) in enumerate(whole.where):
        where = (code, byte) if thorough else (code, line)
        first.setdefault(where, at)
        last[where] = at
    chosen = {*first.values(), *last.values()} if thorough else set(last.values())
    step = PASSED_OVER + 1 if thorough else 1
    return [Interruption(at) for at in sorted(chosen)[::step]]
