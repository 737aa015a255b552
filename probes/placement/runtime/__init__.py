"""Places a model and runs it: each block's weights are there when it is called.

How a model gets to the GPU: `place` (or `load`, one package above) has the `builder` bring every block to its
tier; calls then go through `hooks` to the `engine`.

- `place`: the entry for a model that is built. `handle`: what it returns; measuring and reports.
- `builder`: refuses what can't be placed, packs, fills host memory and VRAM, hands moving blocks to the
  engine.
- `block_placement`: one block on its way there: how it is stored, what writes its bytes.
- `engine`: copies, unpacks and hands over each moving block in time. Its docstring says by which schedule.
- `call_order`: threads take turns, and the next block is predicted.
- `placed_model`: the steps of placing, placing again and giving back, which `handle` builds on. `pass_state`:
  how things were before a pass that is done again. `block_times`: what each block takes.
- `hooks`: the forwards of blocks and of the model. `offloaded`: moving blocks, and the parameters that stand
  in for weights that are elsewhere. `packed_tables`: embeddings that are never unpacked as a whole.
- `kept_weights`: whether a call keeps weights that only come and go.
- `experts`: what modules of experts hold in place of weights. `expert_cache`: which of them are in VRAM, the
  table of addresses, updates between passes. `expert_products`: products straight from the table.
- `weight_sources`: where bytes come from. `origins`: where parameters were before, and how they get back.
- `buffers`: a block's bytes in one buffer, buffers on the device. `host_memory`: pinned memory of exact size.
- `streams`: streams, events and graphs of a device. `capture`: whole passes as graphs.
- `multi_gpu`: a model over several GPUs.
"""
