"""Passes in a thread of their own, in which cuDNN has chosen nothing yet.

torch keeps the algorithm that cuDNN took for a convolution, for each thread until it ends (Conv_v8.cpp's
`thread_local` cache). One that was taken because a workspace was refused once is taken ever after, with
other bits, however much memory there is by then; a new thread chooses anew.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from probes.placement.runtime.call_order import Turns
from probes.placement.runtime.engine import active_transform
from probes.placement.runtime.packed_tables import autocast_dtype

_here = threading.local()


def leave() -> None:
    """No placed model is to run in this thread any more: a library was refused memory in it."""
    _here.is_left = True


def is_left() -> bool:
    """Whether this thread was left."""
    return getattr(_here, "is_left", False)


class OwnThread:
    """A thread that does what another one waits for, as that one would: its modes, stream and turn.

    `end()` ends it; so does the interpreter's end.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._executor = ThreadPoolExecutor(1, "placed-model")

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """What `work` returns or raises there. Where modes of torch are active, it is done in this thread."""
        if active_transform() is not None or _modes_are_active():
            return work(*args)
        mine, interruption = self._turns.mine, None
        there = partial(self._with_turn, work, _ThreadState())
        done = self._executor.submit(contextvars.copy_context().run, there, *args)
        while not done.done():  # an interruption comes after the pass: until then the model is in use
            try:
                wait((done,))
            except BaseException as error:
                interruption = error
        self._turns.mine = mine
        if interruption is not None:
            raise interruption
        return done.result()

    def _with_turn(self, work: Callable[..., Any], state: "_ThreadState", *args: Any) -> Any:
        thread = threading.get_ident()
        self._turns.mine = lambda: threading.get_ident() == thread
        with state.here():
            return work(*args)

    def end(self) -> None:
        """No call follows."""
        self._executor.shutdown(wait=False)


class _ThreadState:
    """What torch keeps for the calling thread and a pass depends on."""

    def __init__(self) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._casts = {kind: autocast_dtype(kind) for kind in ("cpu", "cuda")}
        self._caches = torch.is_autocast_cache_enabled()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def here(self) -> Iterator[None]:
        """Give it to this thread in the block."""
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))  # and its device
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._casts.items():
                if dtype is not None:
                    stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._caches))
            yield


def _modes_are_active() -> bool:
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())
