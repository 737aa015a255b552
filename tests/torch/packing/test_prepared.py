"""Products that are started again: with the same arguments, and only where the compiled kernel is right."""

import inspect
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined: before anything imports one

from types import SimpleNamespace

import pytest
import torch

from probes.placement.packing import launch
from probes.placement.packing.kernels import few_rows, one_row

CONSTANTS = {"K": 64, "STAGES": 3}


class Recorded:
    """A kernel that notes how it is started: looked up anew, or as it was compiled."""

    def __init__(self, signature=("*bf16", "i32", "constexpr", "constexpr")):
        self.looked_up, self.direct = [], []
        self.signature = signature

    def __getitem__(self, grid):
        def look_up(*args, **named):
            self.looked_up.append((grid, args, named))
            if self.signature is None:
                return None
            signature = dict(enumerate(self.signature))
            return _Compiled(self.direct, SimpleNamespace(signature=signature))

        return look_up


class _Compiled:
    def __init__(self, direct, src):
        self._direct, self.src = direct, src

    def __getitem__(self, grid):
        return lambda *args: self._direct.append((grid, args))


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(launch, "_known", {})


def begin(kernel, tensor, key="key"):
    if not launch.start_again(key, [tensor], (7,)):
        launch.start(kernel, (5,), [tensor], (7,), CONSTANTS, options={"num_warps": 4}, key=key)


def test_a_second_start_passes_the_same_arguments_without_looking_them_up():
    kernel, x, y = Recorded(), torch.zeros(8), torch.ones(8)
    begin(kernel, x)
    begin(kernel, y)
    assert kernel.looked_up == [((5,), (x, 7), {**CONSTANTS, "num_warps": 4})]
    assert kernel.direct == [((5, 1, 1), (y.data_ptr(), 7, 64, 3))]


def test_an_address_that_another_kernel_is_compiled_for_is_looked_up():
    kernel, x = Recorded(), torch.zeros(8)
    for tensor in (x[1:], x, x[1:], x):
        begin(kernel, tensor)
    assert [args[0].data_ptr() % 16 for _, args, _ in kernel.looked_up] == [4, 0, 4]
    assert len(kernel.direct) == 1


def test_another_key_is_looked_up():
    kernel, x = Recorded(), torch.zeros(8)
    begin(kernel, x, "one")
    begin(kernel, x, "another")
    assert len(kernel.looked_up) == 2
    assert not kernel.direct


@pytest.mark.parametrize("signature", [None, ("*bf16", "i32")])
def test_the_interpreter_and_a_triton_that_wants_other_arguments_are_started_as_always(signature):
    kernel, x = Recorded(signature), torch.zeros(8)
    for _ in range(3):
        begin(kernel, x)
    assert len(kernel.looked_up) == 3


@pytest.mark.parametrize(("batch", "kernel"), [(1, one_row), (3, few_rows)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_pass_their_arguments_in_the_order_of_the_kernels_parameters(
    monkeypatch, batch, kernel, bias
):
    seen = []
    monkeypatch.setattr(
        launch, "start", lambda *args, **named: seen.append((inspect.signature(args[0].fn), args, named))
    )
    x, y = torch.zeros(batch, 64, dtype=torch.bfloat16), torch.zeros(batch, 32, dtype=torch.bfloat16)
    parts = {name: torch.zeros(16) for name in ("rest0", "codes", "values", "positions", "starts")}
    launch.multiply(
        x, parts, y, base=100, bias=y[0] if bias else None, rows=16, columns=32, warps=4, stages=2
    )
    [(signature, (started, grid, tensors, numbers, constants), named)] = seen
    assert started is kernel
    assert grid == (2,)
    names = list(signature.parameters)
    assert names[len(tensors) + len(numbers) :] == list(constants)
    given = dict(zip(names, (*tensors, *numbers), strict=False))
    assert given["x"] is x
    assert given["y"] is y
    assert given["n"] == 32
    assert all(isinstance(value, float) for name, value in given.items() if name.endswith("scale"))
    assert given.get("batch", 1) == batch
    assert named["options"] == {"num_warps": 4}


def test_calls_that_need_other_kernels_have_other_keys(monkeypatch):
    keys = []
    monkeypatch.setattr(launch, "start", lambda *_, key, **_named: keys.append(key))
    parts = {name: torch.zeros(16) for name in ("rest0", "codes", "values", "positions", "starts")}
    usual = {"base": 100, "bias": None, "rows": 16, "columns": 32, "warps": 4, "stages": 2}

    def call(batch, k, n, **changed):
        x, y = torch.zeros(batch, k, dtype=torch.bfloat16), torch.zeros(batch, n, dtype=torch.bfloat16)
        launch.multiply(x, parts, y, **usual | changed)

    call(1, 64, 32)
    call(2, 64, 32)
    call(3, 64, 32)
    call(1, 128, 32)
    call(1, 64, 64)
    for changed in ({"bias": torch.zeros(32)}, {"rows": 8}, {"columns": 64}, {"warps": 8}, {"stages": 3}):
        call(1, 64, 32, **changed)
    assert len(set(keys)) == len(keys) == 10
