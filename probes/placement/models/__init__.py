"""What a model consists of, from a config.json, a safetensors header or a module tree."""
