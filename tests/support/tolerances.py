"""How near is near enough: an error is judged beside that of dense attention on the same values, never alone."""

import jax
import jax.numpy as jnp
import numpy as np

# The mean error of dense attention can be exactly zero (one key: the output is the value itself), where an online
# softmax divides by its denominator and rounds once more. Values of the tests are of order one, so that a few float32
# roundings of 2^-24 each stay below this; half a bfloat16 step at order one is 4000 times larger.
MEAN_FLOOR = 5e-7
MAX_FLOOR = 1e-5


def assert_accurate(out, oracle, dense):
    """Max error <= 2 x dense's + 1e-5, mean error <= 1.5 x dense's; infinities agree exactly and NaN never passes."""
    out, oracle, dense = (np.asarray(x, np.float64) for x in (out, oracle, dense))
    assert out.shape == oracle.shape == dense.shape, f"shapes: {out.shape}, oracle {oracle.shape}, dense {dense.shape}"
    assert not np.isnan(out).any(), f"{np.isnan(out).sum()} of {out.size} elements are NaN"
    assert not np.isnan(dense).any(), "the dense comparison is NaN: the test is wrong"
    finite = np.isfinite(oracle)
    np.testing.assert_array_equal(out[~finite], oracle[~finite])
    if not finite.any():
        return
    error, bar = (np.abs(x[finite] - oracle[finite]) for x in (out, dense))
    assert error.max() <= 2 * bar.max() + MAX_FLOOR, f"max error {error.max():.3g}, dense has {bar.max():.3g}"
    assert error.mean() <= 1.5 * bar.mean() + MEAN_FLOOR, f"mean error {error.mean():.3g}, dense has {bar.mean():.3g}"


def dense(
    q, k_rows, v_rows, lengths, query_lengths=None, *, scale, window=None, soft_cap=None, sinks=None, alibi_slopes=None
):
    """Dense attention in q's dtype, arguments and results as in `oracle.attention`.

    `jax.nn.dot_product_attention` itself; for a soft cap or sinks, which it lacks, its formula written out, and so for
    float16, because it asks for a float16 dot that CPUs lack. Small sizes are padded to a few, with zeros and masked
    keys, so that most cases share a compiled program.
    """
    q, lengths = np.asarray(q), np.asarray(lengths)
    counts = np.ones_like(lengths) if query_lengths is None else np.asarray(query_lengths)
    starts = np.cumsum(counts) - counts
    num_heads, num_kv_heads, v_head_dim = q.shape[1], k_rows[0].shape[1], v_rows[0].shape[2]

    def room(size, *rooms):
        return next((room for room in rooms if lengths.max() <= 256 and size <= room), max(size, 1))

    batch, most_queries = room(len(lengths), 8), room(counts.max(), 1, 32, 256)
    most_keys, heads = room(lengths.max(), 64, 256), room(num_heads, 16, 128)
    dim = room(max(q.shape[2], v_head_dim), 64, 256)  # of K and V alike, as JAX wants them
    queries = np.zeros((batch, most_queries, heads, dim), q.dtype)
    keys, values = np.zeros((2, batch, most_keys, room(num_kv_heads, 4), dim), q.dtype)
    position = np.full((batch, most_queries), -1)
    for r, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        queries[r, :count, :num_heads, : q.shape[2]] = q[starts[r] : starts[r] + count]
        for cells, rows in ((keys, k_rows), (values, v_rows)):
            cells[r, :length, :num_kv_heads, : rows[r].shape[2]] = np.asarray(rows[r][:length], q.dtype)
        position[r, :count] = np.arange(length - count, length)
    distance = np.arange(most_keys) - position[..., None]
    mask = distance <= 0
    if window is not None:
        mask &= distance > -window

    def of_heads(array, otherwise, dtype=np.float32):
        return np.concatenate([array, np.full(heads - num_heads, otherwise)]).astype(dtype)

    kv_head = of_heads(np.arange(num_heads) // (num_heads // num_kv_heads), 0, np.int32)
    slopes = of_heads(np.zeros(num_heads) if alibi_slopes is None else alibi_slopes, 0)
    logits_of_sinks = of_heads(np.full(num_heads, -np.inf) if sinks is None else sinks, -np.inf)
    cap = np.inf if soft_cap is None else soft_cap
    arrays = queries, keys, values, kv_head, mask[:, None], distance[:, None].astype(np.float32)
    with jax.numpy_dtype_promotion("standard"):  # JAX's own function mixes dtypes
        library, (out, lse) = _dense(*arrays, slopes, logits_of_sinks, np.float32(scale), np.float32(cap))
    if library is not None and soft_cap is None and sinks is None:
        out = library
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    sees = mask.any(-1)  # what sees no key has no dense meaning but the sink
    out = np.where(sees[..., None, None], out, 0)
    lse = np.where(sees[..., None], lse, logits_of_sinks)

    flat_out, flat_lse = np.zeros((*q.shape[:2], v_head_dim)), np.full(q.shape[:2], -np.inf)
    for r, count in enumerate(counts):
        tokens = slice(starts[r], starts[r] + count)
        flat_out[tokens] = out[r, :count, :num_heads, :v_head_dim]
        flat_lse[tokens] = lse[r, :count, :num_heads]
    return flat_out, flat_lse


@jax.jit
def _dense(q, k, v, kv_head, mask, distance, slopes, sinks, scale, soft_cap):
    """JAX's own result, unless it is float16, and the formula's with its log-sum-exp.

    q [B, T, N, H], k and v [B, S, K, H], kv_head [N], mask and distance [B, 1, T, S], slopes and sinks [N].
    """
    k, v = (jnp.take(x, kv_head, axis=2) for x in (k, v))
    bias = slopes[None, :, None, None] * distance
    library = None
    if q.dtype != jnp.float16:
        library = jax.nn.dot_product_attention(q, k, v, bias, mask, scale=scale)
    return library, _formula(q, k, v, bias, mask, sinks, scale, soft_cap)


def _formula(q, k, v, bias, mask, sinks, scale, soft_cap):
    """The same written out: logits and softmax in float32, the weights in q's dtype. No soft cap is an infinite one."""
    operand = jnp.float32 if q.dtype == jnp.float16 else q.dtype
    logits = scale * jnp.einsum(
        "btnh,bsnh->bnts", q.astype(operand), k.astype(operand), preferred_element_type=jnp.float32
    )
    logits = jnp.where(jnp.isinf(soft_cap), logits, soft_cap * jnp.tanh(logits / soft_cap)) + bias
    logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
    sink = jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))
    logits = jnp.concatenate([logits, sink], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[1]].astype(q.dtype)
    lse = jax.nn.logsumexp(logits, axis=-1)
    out = jnp.einsum("bnts,bsnh->btnh", weights.astype(operand), v.astype(operand))
    return out.astype(q.dtype), jnp.swapaxes(lse, 1, 2)
