"""Pools of one-byte values as words of two neighbouring dims, and tiles of such words taken apart for matrix units.

Matrix units take operands from shared memory in words of 16 bits, turned as they need them; bytes would have to be
gathered one by one. A word is two dims, so a tile of words falls apart into its even and its odd dims: the even dims of
q meet the former, its odd dims the latter, and the output is put together at the very end.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int16, Shaped

from pallas_kernels.layouts import pool_sizes
from pallas_kernels.quantisation import is_quantised

WORD = jnp.dtype("int16")

_MATRIX_UNIT = 16  # numbers that it multiplies at once, at least: so many words, once their number is a power of two


class _Recipe(NamedTuple):
    """How two values of two words `$1` become two numbers `$0`, in PTX: those in the words' low or in their high bytes.

    What a float8 holds in fewer bits is moved to its place in the wider float. Where that has more bits for the
    exponent, numbers are too small by a power of two, and NaN and infinity, which no write stores, become numbers.
    """

    low: str
    high: str
    body: str
    shortfall: int = 0  # the power of two


_RECIPES = {  # (dtype of values, dtype of products)
    ("int8", "float16"): _Recipe(  # 1152 + value, as bits; less 1152
        "mov.b32 t, $1;",
        "shr.b32 t, $1, 8;",
        "lop3.b32 t, t, 0x00ff00ff, 0x64806480, 0x6a; mov.b32 u, 0xe480e480; add.rn.f16x2 $0, t, u;",
    ),
    ("int8", "bfloat16"): _Recipe(  # 128 + its low bits, as bits; less 128 or, if it is negative, 256
        "mov.b32 t, $1;",
        "shr.b32 t, $1, 8;",
        "lop3.b32 u, t, 0x007f007f, 0x43004300, 0xea; lop3.b32 t, t, 0x00800080, 0x43004300, 0xea; "
        "mov.b32 m, 0xbf80bf80; fma.rn.bf16x2 $0, t, m, u;",
    ),
    ("float8_e4m3fn", "float16"): _Recipe(
        "prmt.b32 t, $1, 0, 0x4420;",
        "prmt.b32 t, $1, 0, 0x4431;",
        "mov.b32 {h, z}, t; cvt.rn.f16x2.e4m3x2 $0, h;",
    ),
    ("float8_e4m3fn", "bfloat16"): _Recipe(
        "shl.b32 t, $1, 8; shl.b32 u, $1, 4;",
        "mov.b32 t, $1; shr.b32 u, $1, 4;",
        "and.b32 u, u, 0x07f007f0; lop3.b32 $0, t, 0x80008000, u, 0xea;",
        shortfall=120,
    ),
    ("float8_e5m2", "float16"): _Recipe(
        "shl.b32 t, $1, 8;",
        "mov.b32 t, $1;",
        "and.b32 $0, t, 0xff00ff00;",
    ),
    ("float8_e5m2", "bfloat16"): _Recipe(
        "shl.b32 t, $1, 8; shl.b32 u, $1, 5;",
        "mov.b32 t, $1; shr.b32 u, $1, 3;",
        "and.b32 u, u, 0x0fe00fe0; lop3.b32 $0, t, 0x80008000, u, 0xea;",
        shortfall=112,
    ),
}


def is_viewed(axes: str, pool: Shaped[Array, "..."]) -> bool:
    """Whether a pool is read as words: a quantised one whose dims lie last, and are enough for matrix units."""
    head_dim = pool_sizes(axes, pool.shape)["H"]
    return is_quantised(pool.dtype) and not axes.endswith("C") and head_dim % 2 == 0 and head_dim > _MATRIX_UNIT


def view(axes: str, pool: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The pool as words along the head_dim, without a copy; as it is if `is_viewed` says no."""
    if not is_viewed(axes, pool):
        return pool
    return lax.bitcast_convert_type(pool.reshape(*pool.shape[:-1], -1, 2), WORD)


def shortfall(values: np.dtype, product: np.dtype, *, ptx: bool) -> int:
    """The power of two by which the numbers that `take_apart` gives are too small."""
    return _recipe(values, product).shortfall if ptx else 0


def take_apart(
    words: Int16[Array, "..."], values: np.dtype, product: np.dtype, *, ptx: bool
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The first and the second value of each word, as numbers of the dtype of the products.

    Args:
        values: dtype of what the words hold two of.
        ptx: in instructions of NVIDIA's GPUs for two words at once, about a third of what the compiler makes of it.
    """
    if not ptx:
        first, second = words.astype(jnp.int8), lax.shift_right_logical(words, np.int16(8)).astype(jnp.int8)
        first, second = (lax.bitcast_convert_type(byte, values).astype(product) for byte in (first, second))
        return first, second
    recipe = _recipe(values, product)

    def taken(bytes_of: str):
        (numbers,) = plgpu.elementwise_inline_asm(
            f"{{ .reg .b32 t, u, m; .reg .b16 h, z; {bytes_of} {recipe.body} }}",
            args=[words],
            constraints="=r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, _wide(product))],
        )
        return numbers.astype(product)

    return taken(recipe.low), taken(recipe.high)


def _recipe(values: np.dtype, product: np.dtype) -> _Recipe:
    return _RECIPES[values.name, _wide(product)]


def _wide(product: np.dtype) -> str:
    """What values are made of first: float16 holds all of them, and float32 has no instructions for two at once."""
    return "float16" if product == jnp.float32 else product.name


def split(vectors: Shaped[Array, "Q H"]) -> tuple[Shaped[Array, "Q H/2"], Shaped[Array, "Q H/2"]]:
    """The even and the odd dims."""
    by_word = vectors.reshape(vectors.shape[0], -1, 2)
    place = lax.broadcasted_iota(jnp.int32, by_word.shape, 2)
    even, odd = (jnp.where(place == i, by_word, 0).sum(axis=-1) for i in range(2))
    return even, odd


def join(even: Shaped[Array, "Q H/2"], odd: Shaped[Array, "Q H/2"]) -> Shaped[Array, "Q H"]:
    """What `split` has split."""
    place = lax.broadcasted_iota(jnp.int32, (*even.shape, 2), 2)
    return jnp.where(place == 0, even[..., None], odd[..., None]).reshape(even.shape[0], -1)
