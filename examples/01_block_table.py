"""Tokens → block table: rows take pages as they grow and give them back, and a row's pages need not lie in order.

    python examples/01_block_table.py [--png pool.png]

A block table answers one question: which page of the pool holds the i-th block of a row's tokens?
"""

import jax
import jax.numpy as jnp
from picture import Scene, arguments, draw, show

from paged_jax import BlockTable

PAGE_SIZE, NUM_PAGES = 4, 7

# Every method is pure and returns a new table, so it runs inside jit.
extend, release = jax.jit(BlockTable.extend), jax.jit(BlockTable.release)


def main(argv: list[str] | None = None) -> list[Scene]:
    args = arguments(__doc__, argv)
    table = BlockTable.create(NUM_PAGES, PAGE_SIZE, max_rows=3, max_blocks_per_row=5)
    scenes = [show("An empty table: every page is free.", table)]

    table, _ = extend(table, jnp.array([6, 3, 0]))
    scenes.append(show("Rows 0 and 1 get 6 and 3 tokens: pages come from the top of a stack.", table))

    table, _ = extend(table, jnp.array([1, 3, 0]))
    scenes.append(show("They grow by 1 and 3: row 0 has room in its last page, row 1 begins a new one.", table))

    table = release(table, jnp.array([True, False, False]))
    scenes.append(show("Row 0 ends: its pages are free again, and nothing moves.", table))

    table, _ = extend(table, jnp.array([0, 3, 10]))
    scenes.append(show("Row 1 grows and row 2 starts on what was given back: their pages lie out of order.", table))

    # A refusal is a value, so that it can be noticed inside jit too: all rows grow or none does.
    table, ok = extend(table, jnp.array([4, 4, 4]))
    scenes.append(show(f"All ask for more, with too few pages for it: ok is {ok}, and nothing changes.", table))

    # No row wastes more than the rest of its last page.
    num_held = NUM_PAGES - table.num_free
    print(f"\nlengths {table.lengths}: {table.lengths.sum()} tokens in {num_held} pages, {num_held * PAGE_SIZE} cells")
    print(f"table, where {NUM_PAGES} stands for no page:\n{table.pages}")
    print(f"free pages, the next one first: {table.free_pages[: table.num_free][::-1]}")
    if args.png:
        draw(scenes, args.png)
    return scenes


if __name__ == "__main__":
    main()
