"""Every rung of the ladder computes attention and lowers for CUDA; the table is made from what was measured."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest
from attention_cases import meaning
from lowering import lower_for_cuda
from tolerances import assert_accurate

from examples.benchmarks import decode
from examples.ladder import measure, rung4_partitions
from pallas_kernels.cases import DECODE_CASES, DecodeCase

LENGTHS = (0, 1, 150, 15, 64, 17, 128)  # nothing, one token, pages and tiles full, short of full and begun

rungs = pytest.mark.parametrize("rung", measure.RUNGS.values(), ids=measure.RUNGS)


@rungs
@pytest.mark.parametrize(
    ("num_heads", "dtype"),
    [(6, jnp.float32), pytest.param(8, jnp.bfloat16, marks=pytest.mark.full)],
    ids=["group 3", "group 4"],
)
def test_a_rung_is_attention(rung, num_heads, dtype, highest_precision):  # noqa: ARG001
    pool = pools.build(LENGTHS, page_size=16, dtype=dtype, poison=np.nan, garbage=pools.HUGE)
    q = jax.random.normal(jax.random.key(0), (len(LENGTHS), num_heads, 16), dtype)
    attend = jax.jit(functools.partial(rung, interpret=True))
    out = attend(q, pool.cache.k[0], pool.cache.v[0], pool.table.pages, pool.table.lengths)
    truth, bar = meaning(q, pool, None, {})
    assert out.dtype == dtype
    assert_accurate(out, truth[0], bar[0])


@rungs
@pytest.mark.parametrize(("num_heads", "dtype"), [(32, "bfloat16"), (7, "float32")])
def test_a_rung_lowers_for_cuda(rung, num_heads, dtype):
    num_kv_heads = 8 if num_heads == 32 else 1
    q, pool = (jax.ShapeDtypeStruct(s, dtype) for s in ((16, num_heads, 128), (64, 16, num_kv_heads, 128)))
    tables, lengths = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((16, 9), (16,)))
    assert "triton" in lower_for_cuda(rung, q, pool, pool, tables, lengths)


@pytest.mark.parametrize("lengths", [(0,), (1, 0, 70_000), (4096,) * 64, (64, 65, 63, 1, 0) * 9])
@pytest.mark.parametrize("wanted", [1, 7, 66])
def test_parts_of_the_fourth_rung_cover_every_row_once(lengths, wanted):
    cut = jax.jit(rung4_partitions.cut, static_argnums=1)
    parts = jax.tree.map(np.asarray, cut(jnp.array(lengths, jnp.int32), wanted))
    used = parts.row < len(lengths)
    assert np.bincount(parts.row[used], minlength=len(lengths)).tolist() == parts.count.tolist()
    assert (parts.row[parts.first] == np.arange(len(lengths))).all()
    assert parts.index[used].tolist() == [i for count in parts.count.tolist() for i in range(count)]


def test_the_cases_measured_exist():
    assert set(measure.CASES) < {case.name for case in DECODE_CASES}


def gather_and_attend(q, k_pages, v_pages, block_tables, lengths):
    """What a rung computes, in XLA, which compiles sooner."""
    k, v = (pages[block_tables].reshape(q.shape[0], -1, *pages.shape[2:]) for pages in (k_pages, v_pages))
    return jax.nn.dot_product_attention(q[:, None], k, v, key_value_seq_lengths=lengths)[:, 0]


@pytest.mark.full
def test_the_command_writes_times_and_errors(monkeypatch, tmp_path):
    case = DecodeCase("tiny", (40, 1), 4, 2, 16)
    out = tmp_path / "out.json"
    monkeypatch.setattr(decode, "_BYTES_IN_ROTATION", 1)
    monkeypatch.setattr(decode, "_DEPTH", 1)
    monkeypatch.setattr(decode, "_SECONDS_PER_RUN", 0.0)
    monkeypatch.setattr(measure, "DECODE_CASES", (case,))
    monkeypatch.setattr(measure, "CASES", ("tiny",))
    monkeypatch.setattr(measure, "measure_ceiling", lambda _: 10.0)
    monkeypatch.setattr(measure, "RUNGS", {"first": gather_and_attend})
    measure.main(["--rounds", "1", "--out", str(out)])
    measured = json.loads(out.read_text())["cases"]["tiny"]
    assert measured["max_error"]["first"] < 0.02
    assert measured["kv_bytes"] > 0
    assert measured["microseconds"]["first"] > 0
