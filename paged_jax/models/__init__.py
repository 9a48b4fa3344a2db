"""Real models: `load` reads one of nine families from a Hugging Face folder or a GGUF file, ready to generate with.

loaded = paged_jax.models.load()
result = paged_jax.decode(loaded.forward, cache, table, tokens, active, max_new_tokens=20)

For an int8 cache take `loaded.with_even_keys()`: the biases of K of some families are too much for one scale a vector.
"""

from importlib.util import find_spec

if missing := [
    name for name in ("flax", "jinja2", "psutil", "rich", "safetensors", "tokenizers") if not find_spec(name)
]:
    raise ImportError(f'paged_jax.models: expected {", ".join(missing)}, got none: pip install "paged-jax[models]"')

from paged_jax.models.loaded import Loaded, load

__all__ = ["Loaded", "load"]
