"""PagedAttention for JAX."""
