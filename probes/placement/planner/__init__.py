"""Which tier each block of a model goes to, what that takes and how long a pass should last. No torch.

api.py            `plan`, `plan_cards`, the public functions: they take whatever names a model and a machine
plan.py           `make_plan`: from a description, budgets and constants to a plan
multi_gpu.py      `make_cards_plan`: over several equal cards
machine.py        `Constants` of a machine, from profiles.toml (`profile`) or a probe report (`from_report`)
compute_dtype.py  what bfloat16 weights become on a GPU without units for them
rules.py          operations of blocks where nothing was traced
costs.py          seconds and bytes of one block; an `Option` is one tier with its costs
tiers.py          `options`: every tier a block can go to; `surroundings`: VRAM besides weights
experts.py        what a block of experts costs that are placed one by one
experts_cache.py  the VRAM that is left, as their cache; a plan's time by the hit rate
kinds.py          blocks that cost the same, which are planned together
search.py         `search`: the quickest placement, by way of the next four
ilp.py            how many blocks of each kind go to each tier, by integer programming (simplex.py)
pools.py          `with_best_pool`: an assignment of options with the prefetch pool that suits it best
candidates.py     placements of such counts for many prefetch pools
local_search.py   improves a placement block by block
simulation.py     `simulate`: when each block is copied, unpacked and computed in a pass
"""
