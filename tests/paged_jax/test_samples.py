"""What runs by default covers the grid, so that `-m full` adds combinations and no value of any axis."""

import itertools

import gpu_compiler
import numpy as np
import pools
import pytest
from attention_cases import BF16, DECODE, DECODE_SAMPLE, E4M3, E5M2, F16, F32, INT8, RAGGED, RAGGED_SAMPLE
from grid import DIMS, DTYPES, HEADS, LAYOUTS, PAGE_SIZES, crossed, is_default, sampled

from pallas_kernels.cases import DECODE_CASES

SAMPLE = [*(DECODE[name] for name in DECODE_SAMPLE), *(RAGGED[name] for name in RAGGED_SAMPLE)]
POOLS = [dict(case.pool) for case in SAMPLE]
OPTIONS = [dict(case.options) for case in SAMPLE]


def most_pages(case):
    return -(-max(case.lengths) // dict(case.pool)["page_size"])


FOUND = {
    "heads": ({case.heads for case in SAMPLE}, {*HEADS}),
    "head_dims": ({(pool["head_dim"], pool["v_head_dim"] or pool["head_dim"]) for pool in POOLS}, {*DIMS}),
    "page sizes": ({pool["page_size"] for pool in POOLS}, {*PAGE_SIZES}),
    "dtypes": ({(np.dtype(case.q_dtype).name, np.dtype(dict(case.pool)["dtype"]).name) for case in SAMPLE}, {*DTYPES}),
    "quantised dtypes": ({pool["dtype"] for pool in POOLS}, {INT8, E4M3, E5M2}),
    "queries of quantised pools": (
        {case.q_dtype for case in SAMPLE if dict(case.pool)["dtype"] in pools.QUANTISED},
        {F32, BF16, F16},
    ),
    "layouts": ({pool["layout"] for pool in POOLS}, {*LAYOUTS}),
    "windows": ({options.get("window") for options in OPTIONS}, {None, 1, 9, 33}),
    "traced windows": ({case.traced_window for case in SAMPLE}, {True, False}),
    "soft caps": ({options.get("soft_cap") for options in OPTIONS}, {None, 1.0, 50.0}),
    "sinks": ({options.get("sinks") for options in OPTIONS}, {None, True}),
    "ALiBi": ({options.get("alibi_slopes") for options in OPTIONS}, {None, True}),
    "partitions": ({options.get("num_partitions") for options in OPTIONS}, {None, 1, 3}),
    "more partitions than pages": (
        {dict(case.options).get("num_partitions", 0) > most_pages(case) for case in SAMPLE},
        {True},
    ),
    "empty rows": ({0 in case.lengths for case in SAMPLE}, {True, False}),
    "all rows empty": ({max(case.lengths) == 0 for case in SAMPLE}, {True}),
    "shared pages": ({pool["shared"] is None for pool in POOLS}, {True, False}),
    "wide tables": ({(dict(case.pool)["width"] or 0) > 2 * most_pages(case) > 0 for case in SAMPLE}, {True}),
    "query tokens": ({n for case in SAMPLE for n in case.query_lengths or (1,)}, {0, 1, 2, 3, 17, 190}),
    "more queries than keys": (
        {any(map(int.__lt__, case.lengths, case.query_lengths or ())) for case in SAMPLE},
        {True, False},
    ),
    "padding": ({case.padding > 0 for case in SAMPLE}, {True, False}),
}  # fmt: skip


@pytest.mark.parametrize(("found", "wanted"), FOUND.values(), ids=FOUND)
def test_the_cases_of_attention_that_run_by_default_have_every_value_of(found, wanted):
    assert found >= wanted


@pytest.mark.parametrize("cases", [DECODE, RAGGED], ids=["decode", "ragged"])
@pytest.mark.parametrize("axis", ["layout", "dtype"])
def test_each_op_is_run_in_every_layout_and_kind_of_pool_by_default(cases, axis):
    default = DECODE_SAMPLE if cases is DECODE else RAGGED_SAMPLE
    kinds = [*LAYOUTS] if axis == "layout" else [F16, BF16, F32, INT8, E5M2]
    assert {dict(cases[name].pool)[axis] for name in default} >= {*kinds}


@pytest.mark.parametrize("sizes", [(3, 4, 4), (2, 1), (5,), (2, 3)])
def test_a_crossed_sample_has_every_value_of_every_axis_and_the_rest_is_full(sizes):
    axes = [range(size) for size in sizes]
    parameters = crossed(*axes)
    assert [parameter.values for parameter in parameters] == [*itertools.product(*axes)]
    default = [parameter.values for parameter in parameters if is_default(parameter)]
    assert [{*values} for values in zip(*default, strict=True)] == [{*axis} for axis in axes]
    assert len(default) <= np.lcm.reduce(sizes)


def test_a_sample_of_names_is_marked_and_names_no_strangers():
    assert [(p.id, is_default(p)) for p in sampled({"a": 1, "b": 2}, ["b"])] == [("a", False), ("b", True)]
    with pytest.raises(AssertionError, match="no such cases"):
        sampled({"a": 1}, ["c"])


def test_the_share_of_the_gpu_compiler_has_every_kernel_gpu_layout_and_kind_of_dtype():
    cases = {case.name: case for case in DECODE_CASES}
    kernels, gpus = map(set, zip(*gpu_compiler.SAMPLE, strict=True))
    assert kernels == {"paged_decode", "paged_prefill", "paged_cascade"}
    assert gpus == gpu_compiler.GPUS.keys()
    decode = [cases[name] for gpu in gpus for name in gpu_compiler.SAMPLE["paged_decode", gpu]]
    assert {case.layout for case in decode} == {*LAYOUTS}
    assert {case.kv_dtype for case in decode} == {None, "int8", "float8_e4m3fn", "float8_e5m2"}
    assert {case.head_dim for case in decode} == {64, 128, 256}
    ways, dtypes, layouts = map(set, zip(*gpu_compiler.WRITE_SAMPLE, strict=True))
    assert (ways, layouts) == ({"xla", "triton"}, {*LAYOUTS})
    assert dtypes == {"float32", "bfloat16", "int8", "float8_e4m3fn"}
