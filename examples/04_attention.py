"""The whole idea in plain Python: a row's pages lie out of order, and an online softmax walks them token by token.

    python examples/04_attention.py

Paging changes where K and V live and how attention reaches them, never what it computes.
"""

import math
import random

PAGE_SIZE, HEAD_DIM = 4, 3


def paged_attention(q, k_pages, v_pages, block_table, length):
    """One query over one row: token t lies in page block_table[t // PAGE_SIZE], cell t % PAGE_SIZE."""
    peak, total, weighted = -math.inf, 0.0, [0.0] * HEAD_DIM
    for token in range(length):
        page, cell = block_table[token // PAGE_SIZE], token % PAGE_SIZE
        k, v = k_pages[page][cell], v_pages[page][cell]
        score = sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(HEAD_DIM)
        new_peak = max(peak, score)
        decay, weight = math.exp(peak - new_peak), math.exp(score - new_peak)
        weighted = [decay * w + weight * x for w, x in zip(weighted, v, strict=True)]
        total, peak = decay * total + weight, new_peak
    return [w / total for w in weighted]


def dense_attention(q, keys, values):
    """The textbook softmax over keys that lie side by side."""
    scores = [sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(HEAD_DIM) for k in keys]
    weights = [math.exp(score - max(scores)) for score in scores]
    return [sum(w * v[d] for w, v in zip(weights, values, strict=True)) / sum(weights) for d in range(HEAD_DIM)]


def main():
    def vector():
        return [random.gauss(0, 1) for _ in range(HEAD_DIM)]

    keys, values, q = [vector() for _ in range(6)], [vector() for _ in range(6)], vector()
    block_table = [3, 1]  # six tokens: a full page 3, then half of page 1
    nothing = [math.nan] * HEAD_DIM  # cells no token owns are never read
    k_pages, v_pages = ([[nothing] * PAGE_SIZE for _ in range(5)] for _ in range(2))
    for token, (k, v) in enumerate(zip(keys, values, strict=True)):
        page, cell = block_table[token // PAGE_SIZE], token % PAGE_SIZE
        k_pages[page][cell], v_pages[page][cell] = k, v

    paged, dense = paged_attention(q, k_pages, v_pages, block_table, len(keys)), dense_attention(q, keys, values)
    print("paged", *(f"{x:+.6f}" for x in paged))
    print("dense", *(f"{x:+.6f}" for x in dense))
    return paged, dense


if __name__ == "__main__":
    main()
