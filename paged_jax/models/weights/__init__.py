"""Files of weights → parameters: config.json, safetensors and GGUF, their names and shapes, and fetching one."""
