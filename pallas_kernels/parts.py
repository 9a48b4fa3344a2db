"""Parts of one softmax that different programs fold: stored apart, and merged by whichever of them finishes last."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import arguments, partition, softmax
from pallas_kernels.walk import iota


class Part(NamedTuple):
    """The part that a program folds: the `index`-th of `count`, whose entries lie side by side."""

    out_ref: Any  # [R, K * width, Hv] float32: the normalised outputs of all parts
    lse_ref: Any  # [R, K * width]
    entry: Int32[Array, ""]
    index: Int32[Array, ""]
    count: Int32[Array, ""]
    kv_head: Int32[Array, ""]
    width: int  # queries that share the kv head

    @property
    def run(self) -> Run:
        """All parts of the same softmax."""
        first, column = self.entry - self.index, self.kv_head * self.width
        return Run(self.out_ref, self.lse_ref, first, self.count, column)


class Run(NamedTuple):
    """Parts that lie side by side, and where in each of them the queries are."""

    out_ref: Any
    lse_ref: Any
    first: Int32[Array, ""]
    count: Int32[Array, ""]
    column: Int32[Array, ""]


def launch(
    fold: Callable,  # kernel: inputs, arrivals, then out, lse, part_out, part_lse and arrivals again
    merge: Callable,  # kernel: what to merge, part_out, part_lse, out, lse, then out and lse again
    inputs: tuple,
    to_merge: tuple,
    *,
    out: jax.ShapeDtypeStruct,  # [T, N, Hv]
    num_kv_heads: int,
    entries: int,
    width: int,
    owners: int,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    name: str,
) -> tuple[Float[Array, "T N Hv"], Float32[Array, "T N"]]:
    """Launches a kernel whose programs, one for each (kv head, entry), leave parts: its output and log-sum-exp.

    Interpreted programs cannot wait for each other: `fold` has no arrivals there, and `merge` is a second launch.

    Args:
        entries, width: sizes of the parts, as in `Part`.
        owners: softmaxes that may have parts.
    """
    arrivals = None if interpret else jnp.zeros((owners, num_kv_heads), jnp.int32)
    columns, v_head_dim = num_kv_heads * width, out.shape[2]
    out_shape = [
        out,
        jax.ShapeDtypeStruct(out.shape[:2], jnp.float32),
        jax.ShapeDtypeStruct((entries, columns, v_head_dim), jnp.float32),
        jax.ShapeDtypeStruct((entries, columns), jnp.float32),
    ]
    inputs, aliases = (*inputs, arrivals), {}
    if arrivals is not None:
        aliases = {len(jax.tree.leaves(inputs)) - 1: len(out_shape)}
        out_shape.append(jax.ShapeDtypeStruct(arrivals.shape, arrivals.dtype))
    call = functools.partial(pl.pallas_call, grid=(num_kv_heads, entries), interpret=interpret)
    folded = call(
        fold,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        input_output_aliases=aliases,
        name=name,
    )
    whole, lse, *of_parts = arguments.forward_only(lambda inputs: folded(*inputs), inputs)
    if arrivals is not None:
        return whole, lse
    inputs = (*to_merge, *of_parts, whole, lse)
    last = len(jax.tree.leaves(inputs)) - 1
    merged = call(merge, out_shape=out_shape[:2], input_output_aliases={last - 1: 0, last: 1}, name="merge_parts")
    return merged(*inputs)


def settle(
    part: Part,
    out: Float32[Array, "Q v_dim"],
    lse: Float32[Array, " Q"],
    arrivals_ref: Any,  # [owners, K] parts that are done, zeros at first; None: another launch merges
    owner: Int32[Array, ""],
    store_whole: Callable[[Float32[Array, "Q v_dim"], Float32[Array, " Q"]], None],
    *,
    lanes: int,
) -> None:
    """Stores a softmax of one part as it is; or a part of it and, if all others are there, the whole, merged."""

    @pl.when(part.count == 1)
    def store_only_part():
        store_whole(out, lse)

    @pl.when(part.count > 1)
    def store_part():
        store(part.out_ref, part.lse_ref, part.entry, out, lse, part.kv_head, part.width)
        if arrivals_ref is None:
            return
        plgpu.debug_barrier()  # all of the part is stored before its arrival is announced
        arrived = plgpu.atomic_add(arrivals_ref, (owner, part.kv_head), jnp.int32(1))

        @pl.when(arrived == part.count - 1)
        def merge_all():
            store_whole(*merge((part.run,), part.width, lanes=lanes, volatile=True))


def merge(
    runs: Sequence[Run], width: int, *, lanes: int, volatile: bool
) -> tuple[Float32[Array, "Q v_dim"], Float32[Array, " Q"]]:
    """Joins the parts of `width` queries: an online softmax whose keys are the parts.

    A lane is one query of one of the parts at hand; lanes of a query are merged at the end.
    """
    v_head_dim = runs[0].out_ref.shape[2]
    v_dim = iota(pl.next_power_of_2(v_head_dim))
    queries = pl.next_power_of_2(width)
    at_a_time = max(1, lanes // queries)
    lane = iota(at_a_time * queries)
    which, query = lax.div(lane, np.int32(queries)), lax.rem(lane, np.int32(queries))

    def fold_parts(run: Run, i, state):
        index = i * at_a_time + which
        is_part = (index < run.count) & (query < width)
        entry, column = run.first + index, run.column + query
        lse = plgpu.load(run.lse_ref.at[entry, column], mask=is_part, other=-jnp.inf, volatile=volatile)
        out = plgpu.load(
            run.out_ref.at[entry[:, None], column[:, None], v_dim[None, :]],
            mask=is_part[:, None] & (v_dim < v_head_dim)[None, :],
            other=0,
            volatile=volatile,
        )
        return softmax.update(state, lse[:, None], lambda weights: weights * out, unit=softmax.LOG2_E, masked=True)

    state = softmax.init(lane.shape, v_dim.size)
    for run in runs:
        turns = partition.ceil_div(run.count, at_a_time)
        state = lax.fori_loop(0, turns, functools.partial(fold_parts, run), state)
    out, lse = softmax.finish(state, unit=softmax.LOG2_E)
    if at_a_time > 1:
        out, lse = softmax.merge(out.reshape(at_a_time, queries, v_dim.size), lse.reshape(at_a_time, queries))
    return out, lse


def store(out_ref, lse_ref, entry, out, lse, kv_head, width: int) -> None:
    """Stores what belongs to one kv head; lanes past its queries and past the head_dim stay behind."""
    lane, v_dim = iota(out.shape[0]), iota(out.shape[1])
    column, is_query = kv_head * width + lane, lane < width
    mask = is_query[:, None] & (v_dim < out_ref.shape[2])[None, :]
    plgpu.store(out_ref.at[entry, column[:, None], v_dim[None, :]], out.astype(out_ref.dtype), mask=mask)
    plgpu.store(lse_ref.at[entry, column], lse, mask=is_query)
