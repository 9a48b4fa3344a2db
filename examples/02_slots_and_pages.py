"""Block table → slots → scatter → pages: each token of a forward pass is written in a cell of its own.

    python examples/02_slots_and_pages.py [--png pool.png]

A slot is a cell's number in the whole pool: page · page_size + offset. Here a token's K and V are its own id.
"""

import jax
import jax.numpy as jnp
import numpy as np
from picture import Scene, arguments, draw, show

from paged_jax import BlockTable, PagedCache

PAGE_SIZE, NUM_PAGES = 4, 6

plan, read = jax.jit(BlockTable.step, static_argnames="size"), jax.jit(PagedCache.read)


@jax.jit
def write(cache, tokens, slots):
    """The scatter, which a model does once in each layer."""
    k = v = tokens[:, None, None].astype(jnp.float32)  # [T, one kv head, head_dim 1]
    return cache.write(0, k, v, slots)


def main(argv: list[str] | None = None) -> list[Scene]:
    args = arguments(__doc__, argv)
    table = BlockTable.create(NUM_PAGES, PAGE_SIZE, max_rows=2, max_blocks_per_row=3)
    cache = PagedCache.create(1, NUM_PAGES, PAGE_SIZE, num_kv_heads=1, head_dim=1, dtype=jnp.float32)

    # Prompts: the rows' tokens are packed one after the other, and padded to a size that does not change.
    table, step, _ = plan(table, jnp.array([3, 5]), size=10)
    tokens = jnp.array([10, 11, 12, 20, 21, 22, 23, 24, 0, 0])
    cache = write(cache, tokens, step.slots)
    for name, array in (("tokens", tokens), ("rows", step.rows), ("positions", step.positions), ("slots", step.slots)):
        print(f"{name:10}", *(f"{entry:3}" for entry in np.asarray(array)))
    print(f"Row {table.max_rows} and slot {NUM_PAGES * PAGE_SIZE} are padding, just past the end: nothing is written.")
    scenes = [show("Prompts of 3 and 5 tokens, in pages 0 and 1, 2.", table, cells(cache))]

    # Decoding: token t belongs to row t, and row 1 ends after the first step.
    for tokens, is_live in (([13, 25], [1, 1]), ([14, 0], [1, 0])):
        table, step, _ = plan(table, jnp.array(is_live))
        cache = write(cache, jnp.array(tokens), step.slots)
        scenes.append(show(f"One token for each live row: {tokens}, slots {step.slots}.", table, cells(cache)))

    # The slot of any position can be looked up; the last one here is past row 0's end.
    print("\nslots of row 0:", table.slots(jnp.arange(6), jnp.array(0)))
    k, _ = read(cache, 0, table)
    print(f"read back in order, zero past a row's end:\n{np.asarray(k, int)[:, :, 0, 0]}")
    if args.png:
        draw(scenes, args.png)
    return scenes


def cells(cache: PagedCache) -> np.ndarray:
    """What the pool's cells hold: [P, C]."""
    return np.asarray(cache.k, int)[0, :, :, 0, 0].astype("U2")


if __name__ == "__main__":
    main()
