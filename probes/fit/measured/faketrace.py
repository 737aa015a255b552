"""A step traced without its bytes: torch runs every operation on sizes alone, and each storage is counted.

Works for whatever torch can run, so for any module. Not seen is what a kernel allocates within itself.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from probes.fit.measured import onestep
from probes.fit.question import Question, Taken

ALIGNMENT: Final = {"cuda": 512, "cpu": 64}  # bytes that torch's allocators round to


class Counter(TorchDispatchMode):  # type: ignore[misc]
    """Counts the bytes of storages from their making until nothing refers to them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._align = ALIGNMENT[device.partition(":")[0]]
        self._seen: Any = weakref.WeakKeyDictionary()
        self.alive = self.highest = 0
        self.at_highest: Callable[[], None] = lambda: None

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count what it made."""
        made = function(*args, **(kwargs or {}))
        for value in tree_iter(made):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        n_bytes = -(-storage.nbytes() // self._align) * self._align
        self._seen[storage] = n_bytes
        weakref.finalize(storage, self._free, n_bytes).atexit = False
        self.alive += n_bytes
        if self.alive > self.highest:
            self.highest = self.alive
            self.at_highest()

    def _free(self, n_bytes: int) -> None:
        self.alive -= n_bytes

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the storages of tensors, each once."""
        storages = {id(t.untyped_storage()): t.untyped_storage() for t in tensors}
        return sum(self._seen.get(storage, 0) for storage in storages.values())


def trace(config: Mapping[str, Any], asked: Question, device: str) -> Taken:
    """The bytes at the peak of a question's steps, by a trace. Raises what `onestep.prepare` raises."""
    made = onestep.make(config, asked, "meta")
    with _no_packed_sequences(), FakeTensorMode(), Counter(device) as counter:
        _fill(made.module, device)
        ready = onestep.ready(made, asked, device)
        taken = [_divided(counter, ready)]

        def note() -> None:
            taken[0] = _divided(counter, ready)

        counter.at_highest = note
        onestep.run(ready, asked, lambda _: None)
        return taken[0]


@contextmanager
def _no_packed_sequences() -> Iterator[None]:
    """Say for transformers that a batch has whole sequences: it sees that by values, which aren't there.

    Otherwise it makes a mask, and repeats keys and values, that a real step does without.
    """
    masks = sys.modules.get("transformers.masking_utils")
    before = getattr(masks, "find_packed_sequence_indices", None)
    if masks is None or before is None:
        yield
        return
    masks.find_packed_sequence_indices = lambda *_, **__: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = before  # type: ignore[attr-defined]


def _fill(module: torch.nn.Module, device: str) -> None:
    """Replace every parameter and buffer by one of the same size on a device; shared ones stay shared."""
    made: dict[int, torch.Tensor] = {}

    def like(old: torch.Tensor) -> torch.Tensor:
        if id(old) not in made:
            new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device)
            made[id(old)] = (
                torch.nn.Parameter(new, old.requires_grad) if isinstance(old, torch.nn.Parameter) else new
            )
        return made[id(old)]

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            held.update({name: like(old) for name, old in held.items() if old is not None})


def _divided(counter: Counter, ready: onestep.Prepared) -> Taken:
    """What is alive now, by what it is."""
    weights = counter.bytes_of(ready.module.parameters())
    gradients = counter.bytes_of(p.grad for p in ready.module.parameters() if p.grad is not None)
    state = ready.optimizer.state.values() if ready.optimizer else ()
    kept = counter.bytes_of(
        value for each in state for value in each.values() if isinstance(value, torch.Tensor)
    )
    rest = counter.alive - weights - gradients - kept
    return Taken(weights=weights, gradients=gradients, optimizer=kept, activations=max(rest, 0))
