"""The host's check of the slots of one write: what a write would drop, or leave unspecified."""

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import PagedCache

PAGES, PAGE_SIZE = 6, 5
PADDING = PAGES * PAGE_SIZE


def check_slots(slots):
    PagedCache.create(1, PAGES, PAGE_SIZE, 2, 16, jnp.float32).check_slots(slots)


@pytest.mark.parametrize("slots", [[], [7, 0, PADDING, 29, PADDING], [PADDING], np.arange(PADDING + 1)], ids=len)
def test_slots_that_write_every_token_once_pass(slots):
    check_slots(np.asarray(slots, np.int32))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([3, 7, PADDING, 3], r"token 3: .*slot 3 \(page 0\).*token 0's"),
        ([29, 12, 12, 29], r"token 2: .*slot 12 \(page 2\).*token 1's"),
        ([0, -1, 0], r"token 1: expected .* got slot -1"),
        ([0, PADDING + 1], rf"token 1: expected .* got slot {PADDING + 1} \(page {PAGES}\)"),
        ([0, 2**40], rf"token 1: expected .* got slot {2**40}"),
        ([[0, 1]], "1-D integer"),
        ([0.0, 1.0], "1-D integer"),
    ],
    ids=str,
)
def test_slots_that_would_lose_a_token_are_named(slots, message):
    with pytest.raises(ValueError, match=message):
        check_slots(np.asarray(slots))
