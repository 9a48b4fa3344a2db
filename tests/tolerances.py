"""How near is near enough: an error is judged beside that of dense attention on the same values, never alone."""

import functools

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
    float16, because it asks for a float16 dot that CPUs lack.
    """
    q = np.asarray(q)
    lengths = np.asarray(lengths)
    counts = np.ones_like(lengths) if query_lengths is None else np.asarray(query_lengths)
    batch, most_queries, most_keys = len(lengths), max(1, counts.max()), max(1, lengths.max())
    starts = np.cumsum(counts) - counts

    queries = np.zeros((batch, most_queries, *q.shape[1:]), q.dtype)
    keys = np.zeros((batch, most_keys, *k_rows[0].shape[1:]), q.dtype)
    values = np.zeros((batch, most_keys, *v_rows[0].shape[1:]), q.dtype)
    for r in range(batch):
        queries[r, : counts[r]] = q[starts[r] : starts[r] + counts[r]]
        keys[r, : lengths[r]] = np.asarray(k_rows[r][: lengths[r]], q.dtype)
        values[r, : lengths[r]] = np.asarray(v_rows[r][: lengths[r]], q.dtype)
    distance = np.arange(most_keys) - ((lengths - counts)[:, None] + np.arange(most_queries))[..., None]
    mask = (distance <= 0) & (np.arange(most_keys) < lengths[:, None, None])
    if window is not None:
        mask &= distance > -window
    bias = None
    if alibi_slopes is not None:
        bias = (np.asarray(alibi_slopes)[:, None, None] * distance[:, None]).astype(np.float32)

    arrays = *map(jnp.asarray, (queries, keys, values)), bias, mask[:, None], sinks
    with jax.numpy_dtype_promotion("standard"):  # JAX's own function mixes dtypes
        out, lse = _dense(*arrays, scale=scale, soft_cap=soft_cap)
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    sees = mask.any(-1)  # what sees no key has no dense meaning but the sink
    out = np.where(sees[..., None, None], out, 0)
    lse = np.where(sees[..., None], lse, -np.inf if sinks is None else sinks)

    flat_out, flat_lse = np.zeros((*q.shape[:2], out.shape[-1])), np.full(q.shape[:2], -np.inf)
    for r in range(batch):
        tokens = slice(starts[r], starts[r] + counts[r])
        flat_out[tokens], flat_lse[tokens] = out[r, : counts[r]], lse[r, : counts[r]]
    return flat_out, flat_lse


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap"))
def _dense(q, k, v, bias, mask, sinks, *, scale, soft_cap):
    """q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv], bias [B, N, T, S], mask [B, 1, T, S]."""
    out, lse = _formula(q, k, v, bias, mask, sinks, scale, soft_cap)
    if soft_cap is None and sinks is None and q.dtype != jnp.float16:
        # It wants K and V of one head_dim: zeros behind either change no product.
        widest = max(k.shape[-1], v.shape[-1])
        wide = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, widest - x.shape[-1]))) for x in (q, k, v))
        out = jax.nn.dot_product_attention(*wide, bias, mask, scale=scale)[..., : v.shape[-1]]
    return out, lse


def _formula(q, k, v, bias, mask, sinks, scale, soft_cap):
    """The same written out: logits and softmax in float32, the weights in q's dtype."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    operand = jnp.float32 if q.dtype == jnp.float16 else q.dtype
    logits = scale * jnp.einsum(
        "btnh,bsnh->bnts", q.astype(operand), k.astype(operand), preferred_element_type=jnp.float32
    )
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + bias
    logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        sink = jnp.asarray(sinks, jnp.float32)[None, :, None, None]
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink, (*logits.shape[:3], 1))], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[1]].astype(q.dtype)
    lse = jax.nn.logsumexp(logits, axis=-1)
    out = jnp.einsum("bnts,bsnh->btnh", weights.astype(operand), v.astype(operand))
    return out.astype(q.dtype), jnp.swapaxes(lse, 1, 2)
