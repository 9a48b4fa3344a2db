"""Pages with several holders: a fork shares full pages, a prompt starts on cached ones, and nobody writes either.

    python examples/03_sharing.py [--png pool.png]

Each cell holds one letter, where a model would keep that token's K and V. Among a page's holders + is the prefix cache.
"""

import jax
import jax.numpy as jnp
import numpy as np
from picture import Scene, arguments, draw, show

from paged_jax import BlockTable, PagedCache
from paged_jax.prefix_cache import PrefixCache

PAGE_SIZE, NUM_PAGES, ROWS, SIZE = 4, 9, 3, 16

fork, truncate, release = map(jax.jit, (BlockTable.fork, BlockTable.truncate, BlockTable.release))
copy_pages = jax.jit(PagedCache.copy_pages)


@jax.jit
def step_and_write(table, cache, num_tokens, letters):
    table, step, _ = table.step(num_tokens, size=SIZE)
    k = v = letters[:, None, None].astype(jnp.float32)
    return table, cache.write(0, k, v, step.slots)


def main(argv: list[str] | None = None) -> list[Scene]:
    args = arguments(__doc__, argv)
    table = BlockTable.create(NUM_PAGES, PAGE_SIZE, ROWS, max_blocks_per_row=5)
    cache = PagedCache.create(1, NUM_PAGES, PAGE_SIZE, num_kv_heads=1, head_dim=1, dtype=jnp.float32)
    scenes = []

    def write(*texts):
        """Each row goes on with its text."""
        letters = jnp.array([*map(ord, "".join(texts).ljust(SIZE))])
        return step_and_write(table, cache, jnp.array([*map(len, texts)]), letters)

    def look(title):
        scenes.append(show(title, table, np.vectorize(chr)(np.asarray(cache.k, int)[0, :, :, 0, 0])))

    table, cache = write("the cat sa", "", "")
    look("Row 0 holds 'the cat sa'; its last page is half full.")

    # Both rows would go on to write the last page, so it is copied; `copies` says from where to where.
    table, copies, _ = fork(table, jnp.array([0]), jnp.array([1]))
    cache = copy_pages(cache, copies)
    look(f"Row 1 is forked from row 0: full pages are shared, page {copies.src[0]} is copied to {copies.dst[0]}.")
    table, cache = write("t up", "ng", "")
    look("Both write on, and neither sees what the other writes.")

    prefixes = PrefixCache(PAGE_SIZE)
    table = prefixes.insert(table, 0, [*map(ord, "the cat sat up")])
    table = release(table, jnp.array([True, True, False]))
    look("Both have ended, but the prefix cache holds on to row 0's full pages.")

    prompt = "the cat ran"
    table, found, _ = prefixes.adopt(table, 2, [*map(ord, prompt)])
    table, cache = write("", "", prompt[found:])
    look(f"Row 2's prompt is '{prompt}': {found} of its tokens are there already.")

    # Cut inside a page that others hold too, a row gets a copy to go on in.
    table, copies, _ = truncate(table, jnp.array([0, 0, 6]))
    cache = copy_pages(cache, copies)
    table, cache = write("", "", "r")
    look("Row 2 is cut to 'the ca' and goes on with 'r', in a page of its own.")

    table, freed = prefixes.evict(table, NUM_PAGES)
    look(f"Eviction frees {freed} pages, but not the one that row 2 holds.")
    if args.png:
        draw(scenes, args.png)
    return scenes


if __name__ == "__main__":
    main()
