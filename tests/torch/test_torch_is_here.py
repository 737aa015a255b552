import torch
import triton


def test_kernels_are_interpreted_on_the_cpu():
    assert not torch.cuda.is_available()
    assert triton.runtime.interpreter.InterpretedFunction
