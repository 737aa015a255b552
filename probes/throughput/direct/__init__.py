"""A model called in a loop: each way of running it in a fresh process, over batch sizes.

`scan` runs the ways and saves rows as they come; `worker` is the process of one way; `trials` repeats its
batch sizes; `torch_runner` and `onnx_runner` run `models`. `results` has the rows, `knee` what they say.
"""
