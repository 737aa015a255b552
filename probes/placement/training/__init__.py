"""Trains a model larger than VRAM: what a step needs is on the card when it is needed.

- `plan`: what stays on the card, what is in host memory and what is made again, for a budget; no GPU needed.
- `handle`: `train`, and what it returns: the model and the optimizer as they were, in an ordinary loop.
- `updates`: the optimizer's own code on the card, on states that pass through a ring of buffers.
- `weights`: copies of weights in the dtype of autocast; their master weights are in host memory.
- `frozen`: weights that aren't trained, packed without loss and copied for each block's forward and backward.
- `activations`: what a block saves for its backward pass: kept, made again, or in host memory meanwhile.
"""
