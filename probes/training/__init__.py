"""Time per epoch of training, over processes, nodes, batches and number formats.

report: what a rank and all runs report, and their files. figures: means, efficiency, what an epoch's time
went into, and what bounds it, derived from reports. Neither needs torch.
worker: one rank, started by torchrun or any other launcher (docs/decisions/0122), with `options`. It uses
`models` (what is trained), `loop` (an epoch), `checkpoint`, and `guard` (signals, and ranks that hang).
local: starts the ranks of one machine by torchrun, beside a watch.
"""
