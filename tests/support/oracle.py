"""What attention means: numpy, float64, one loop per query token. Imports neither package."""

import math

import numpy as np


def _token(q, k, v, position, *, scale, window, soft_cap, sinks, alibi_slopes):
    """One query token q [N, H] at `position` over its row's keys k [n, K, H], v [n, K, Hv]."""
    num_heads, group = q.shape[0], q.shape[0] // k.shape[1]
    out, lse = np.zeros((num_heads, v.shape[2])), np.full(num_heads, -np.inf)
    first = 0 if window is None else max(0, position - window + 1)
    keys = np.arange(first, position + 1)
    for head in range(num_heads):
        logits = scale * (k[keys, head // group] @ q[head])
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        if alibi_slopes is not None:
            logits = logits + alibi_slopes[head] * (keys - position)
        sink = -np.inf if sinks is None else sinks[head]
        top = max(logits.max(initial=-np.inf), sink)
        if top == -np.inf:
            continue
        weights = np.exp(logits - top)
        denominator = weights.sum() + np.exp(sink - top)
        out[head] = weights @ v[keys, head // group] / denominator
        lse[head] = top + math.log(denominator)
    return out, lse


def attention(
    q, k_rows, v_rows, lengths, query_lengths=None, *, scale, window=None, soft_cap=None, sinks=None, alibi_slopes=None
):
    """Dense attention of q [T, N, H] over plain rows: k_rows[r] [>= lengths[r], K, H], v_rows[r] [.., K, Hv].

    Without `query_lengths` token r is the last of row r; with it, each row's last tokens are packed in row order.
    Returns out [T, N, Hv] and lse [T, N]. Padding tokens give zeros and -inf; so does a token without keys, but for
    the sink, which is one more logit of its denominator.
    """
    q = np.asarray(q, np.float64)
    k_rows, v_rows = ([np.asarray(row, np.float64) for row in rows] for rows in (k_rows, v_rows))
    sinks, alibi_slopes = (None if x is None else np.asarray(x, np.float64) for x in (sinks, alibi_slopes))
    out = np.zeros((*q.shape[:2], v_rows[0].shape[-1]))
    lse = np.full(q.shape[:2], -np.inf)
    token = 0
    for row, length in enumerate(lengths):
        count = 1 if query_lengths is None else int(query_lengths[row])
        for position in range(int(length) - count, int(length)):
            out[token], lse[token] = _token(
                q[token],
                k_rows[row],
                v_rows[row],
                position,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
                sinks=sinks,
                alibi_slopes=alibi_slopes,
            )
            token += 1
    return out, lse


def gather(pool, block_table, lengths):
    """The rows of one layer's pool [P, C, K, H], cell by cell: a list of float64 [length, K, H]."""
    pool = np.asarray(pool)
    page_size = pool.shape[1]
    rows = []
    for blocks, length in zip(np.asarray(block_table), np.asarray(lengths), strict=True):
        row = np.empty((int(length), *pool.shape[2:]), np.float64)
        for j in range(int(length)):
            row[j] = pool[blocks[j // page_size], j % page_size].astype(np.float64)
        rows.append(row)
    return rows


def paged(q, k_pool, v_pool, block_table, lengths, query_lengths=None, **options):
    """`attention` over raw pools [P, C, K, H] and [P, C, K, Hv] reached through a block table [B, M]."""
    k_rows, v_rows = (gather(pool, block_table, lengths) for pool in (k_pool, v_pool))
    return attention(q, k_rows, v_rows, lengths, query_lengths, **options)
