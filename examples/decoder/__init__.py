"""A Flax decoder that generates text through paged_jax, and the loaders that feed it real models."""
