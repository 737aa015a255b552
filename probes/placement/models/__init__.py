"""What a model consists of, from a config.json, a safetensors header or a module tree.

description.py          `ModelDescription`: blocks in call order with their tensors, as the planner sees them
reading.py              `describe`: a known name, a config, safetensors or a folder of them, described
families.py             descriptions by a config alone; families.toml lists the tensors of each architecture
headers.py              `read_checkpoint`: the checked headers of safetensors files
modules.py              `find_blocks`, `describe_module`: a torch module's blocks (with torch)
experts.py              `find_experts`: the experts of a torch module (with torch)
operations.py           `Operation`, `Trace`: what a pass does
tracing.py              `traced_module`, `traced_config`: descriptions with each block's traced operations
inputs.py               what a model of transformers is called with
transformers_config.py  transformers' configuration object of a config.json, and its model on meta

Others may use what is named here, and `Block` and `Entry` of modules.py.
"""
