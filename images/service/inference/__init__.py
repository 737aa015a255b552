"""The tokenizer and the model. `classifier` has what the rest of the service sees of them.

    model         loads a model onto its device and runs it; the only file that knows all others
    bert          the forward pass, plain and compiled
    cuda_graphs   passes recorded as CUDA graphs, for the shapes of `buckets`
    placement     weights placed by a plan of `probes.placement`, for models larger than VRAM
    checkpoint    checks config.json and the header of model.safetensors; mounted reads the weights
    hub           fetches a model's files from a Hugging Face hub
    tokenizer     text to token ids
    device        which torch device a profile means, and whether the image has code for it

bert, cuda_graphs, model, mounted and placement import torch; the others are used and tested without it.
"""
