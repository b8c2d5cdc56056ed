"""Matmuls of rows in groups, each group with a matrix of its own (Gale et al. 2022, MegaBlocks).

`grouped_matmul` and its two gradients are grouped matmuls themselves, each an operation of its own
in a program (`jax.lax.composite`): jaxpipe splits backwards between them, keeps their results under
the policy "dots", and counts the FLOPs that they state. On Hopper GPUs they run jax's Pallas
kernels. Elsewhere a loop multiplies blocks of rows, as many as there turn out to be, so that both
compute what the groups need and nothing else but the padding of their last blocks.

Dimension suffixes: P rows, X groups, I width of a row, O width of a product.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_WARPGROUP_ROWS = 64
"""Rows of the smallest matmul of Hopper's tensor cores."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    x_PI: jax.Array, kernels_XIO: jax.Array, sizes_X: jax.Array, expected_rows: int
) -> jax.Array:
    """Multiplies the first ``sizes_X[0]`` rows by the first kernel, the next by the second, ...

    Rows behind the last group give zeros. Kernels are read in the dtype of x. Their
    gradient is float32, which Pallas' kernel for Hopper rounds to the dtype of x, once per call.

    Args:
      x_PI: the rows, in the order of their groups.
      kernels_XIO: a matrix per group.
      sizes_X: int32, rows per group; any may be 0, and together they are at most P.
      expected_rows: how many rows the groups have together if what chooses them is balanced, from
        which FLOPs are counted; P only if they always have all.

    Returns:
      [P, O], in the dtype of x.

    Example:
      >>> x = jnp.array([[1.0], [2.0], [3.0]])
      >>> kernels = jnp.array([[[10.0]], [[100.0]], [[1000.0]]])
      >>> grouped_matmul(x, kernels, jnp.array([2, 0, 1]), 3)[:, 0].tolist()
      [10.0, 20.0, 3000.0]
    """
    return _times_kernels(x_PI, kernels_XIO, sizes_X, expected_rows, transposed=False)


def _forward(
    x_PI: jax.Array, kernels_XIO: jax.Array, sizes_X: jax.Array, expected_rows: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    y_PO = _times_kernels(x_PI, kernels_XIO, sizes_X, expected_rows, transposed=False)
    return y_PO, (x_PI, kernels_XIO, sizes_X)


def _backward(
    expected_rows: int, residuals: tuple[jax.Array, ...], dy_PO: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x_PI, kernels_XIO, sizes_X = residuals
    flops = 2.0 * expected_rows * kernels_XIO[0].size
    dx_PI = _times_kernels(dy_PO, kernels_XIO, sizes_X, expected_rows, transposed=True)
    dkernels_XIO = _kernel_gradients(x_PI, dy_PO, sizes_X, flops=flops)
    widest = jnp.promote_types(dkernels_XIO.dtype, kernels_XIO.dtype)
    return dx_PI, dkernels_XIO.astype(widest), None


grouped_matmul.defvjp(_forward, _backward)


def _times_kernels(
    x: jax.Array, kernels: jax.Array, sizes: jax.Array, expected_rows: int, *, transposed: bool
) -> jax.Array:
    flops = 2.0 * expected_rows * kernels[0].size
    static = {"transposed": transposed, "expected_rows": expected_rows, "flops": flops}
    y = _product(x, kernels.astype(x.dtype), sizes, **static)
    if expected_rows == len(x):
        return y
    return jnp.where(jnp.arange(len(x))[:, None] < sizes.sum(), y, 0)


@functools.partial(lax.composite, name="jaxpipe.grouped_matmul")
def _product(
    x: jax.Array, kernels: jax.Array, sizes: jax.Array, /, *, transposed: bool, expected_rows: int,
    flops: float,
) -> jax.Array:  # fmt: skip
    """Multiplies each group by its kernel, or its transpose; rows behind the last are undefined."""
    del flops
    if _runs_on_hopper(x, kernels.shape[1:]):
        product = functools.partial(_hopper_product, kernels, sizes, transposed)
        # The kernel visits all rows. Those behind a quarter more than are expected are left out if
        # no group has them.
        few = -(-5 * expected_rows // 4)
        if few >= len(x):
            return product(x)
        more = len(x) - few
        return lax.cond(
            sizes.sum() <= few, lambda x: _with_room(product(x[:few]), more), product, x
        )
    blocks = Blocks.of(sizes, len(x))
    padded = _with_room(x, blocks.rows)

    def multiply(n: jax.Array, y: jax.Array) -> jax.Array:
        kernel = kernels[blocks.group[n]]
        product = blocks.cut(padded, n) @ (kernel.T if transposed else kernel)
        # What lies behind the group's end is overwritten by the next one's first block.
        return lax.dynamic_update_slice_in_dim(y, product, blocks.start[n], axis=0)

    width = kernels.shape[1 if transposed else 2]
    y = jnp.zeros((len(padded), width), x.dtype)
    return lax.fori_loop(0, blocks.num_used, multiply, y)[: len(x)]


@functools.partial(lax.composite, name="jaxpipe.grouped_matmul_of_kernels")
def _kernel_gradients(
    x: jax.Array, dy: jax.Array, sizes: jax.Array, /, *, flops: float
) -> jax.Array:
    """Multiplies the rows of x, transposed, by those of dy, group by group."""
    del flops
    shape = x.shape[1], dy.shape[1]
    if _runs_on_hopper(x, shape):
        return _hopper_kernel_gradients(x, dy, sizes)
    blocks = Blocks.of(sizes, len(x))
    x, dy = (_with_room(rows, blocks.rows) for rows in (x, dy))

    def add(n: jax.Array, sums: jax.Array) -> jax.Array:
        group = blocks.group[n]
        is_own = blocks.start[n] + jnp.arange(blocks.rows) < blocks.ends[group]
        x_block = jnp.where(is_own[:, None], blocks.cut(x, n), 0)
        product = jnp.einsum(
            "pi,po->io", x_block, blocks.cut(dy, n), preferred_element_type=jnp.float32
        )
        return sums.at[group].add(product)

    return lax.fori_loop(0, blocks.num_used, add, jnp.zeros((len(sizes), *shape), jnp.float32))


class Blocks(NamedTuple):
    """Blocks of rows that cover all groups; each begins in one group, and the last may go past it.

    Args:
      group, start: of each block, its group and first row.
      ends: the row behind each group.
      num_used: how many blocks there are; the others of ``group`` and ``start`` are not.
      rows: of a block.
    """

    group: jax.Array
    start: jax.Array
    ends: jax.Array
    num_used: jax.Array
    rows: int

    @classmethod
    def of(cls, sizes: jax.Array, num_rows: int) -> Blocks:
        # Last blocks are half empty on average, which adds a quarter where a block is half a mean
        # group. On CPUs, blocks of 16 rows are about as fast per row as larger ones.
        half = num_rows // len(sizes) // 2
        rows = min(128, max(16, 1 << half.bit_length() - 1)) if half else 16
        counts = -(-sizes // rows)
        ends, last = jnp.cumsum(sizes), jnp.cumsum(counts)
        number = jnp.arange(-(-num_rows // rows) + len(sizes))
        group = jnp.minimum(jnp.searchsorted(last, number, side="right"), len(sizes) - 1)
        start = (ends - sizes)[group] + rows * (number - (last - counts)[group])
        return cls(group, start, ends, last[-1], rows)

    def cut(self, padded: jax.Array, number: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(padded, self.start[number], self.rows)


def _with_room(rows: jax.Array, more: int) -> jax.Array:
    return jnp.pad(rows, ((0, more), (0, 0)))


# Hopper.


def _runs_on_hopper(x: jax.Array, shape: tuple[int, ...]) -> bool:
    """Whether jax's kernels for Hopper take these operands: 16 bits, and sizes in warpgroups.

    Devices that a program is only compiled for (`jaxpipe.planning.without_devices`) are H100s.
    """
    fits = x.dtype.itemsize == 2 and not any(size % _WARPGROUP_ROWS for size in shape)
    if not fits or jax.default_backend() != "gpu":
        return False
    return getattr(jax.local_devices()[0], "compute_capability", "9.0") == "9.0"


class Tiles(NamedTuple):
    """The way in which jax's kernels for Hopper cut a matmul.

    Args:
      rows, columns: of the part of the result that a multiprocessor computes at a time.
      steps: how many pieces of the operands are loaded ahead.
      turn: columns of tiles that are computed before the next ones, while rows go by.
    """

    rows: int
    columns: int
    steps: int = 6
    turn: int = 8


def product_tiles(num_rows: int, num_groups: int, width: int, product_width: int) -> Tiles:
    """Chooses what was fastest on an H100 (benchmarks/studies/h100.md).

    Each group but the first adds a tile of rows that is not full.
    """
    if width >= 4096 and product_width % 256 == 0:
        return Tiles(64, 256, steps=4, turn=1)
    return Tiles(128 if num_rows >= 128 * num_groups else 64, min(128, product_width))


def _gradient_tile(size: int) -> int:
    return 64 if size % 128 else 128


# Jitted, since jax traces these kernels for a time that grows with the groups.
@functools.partial(jax.jit, static_argnums=2)
def _hopper_product(
    kernels: jax.Array, sizes: jax.Array, transposed: bool, x: jax.Array
) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    product_width = kernels.shape[1 if transposed else 2]
    tiles = product_tiles(len(x), len(sizes), x.shape[1], product_width)
    return ragged_dot_mgpu.ragged_dot(
        x,
        kernels,
        group_sizes=sizes,
        transpose_rhs=transposed,
        block_m=tiles.rows,
        block_n=tiles.columns,
        block_k=64,
        max_concurrent_steps=tiles.steps,
        grid_block_n=tiles.turn,
    )


@jax.jit
def _hopper_kernel_gradients(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    tiles = Tiles(_gradient_tile(x.shape[1]), _gradient_tile(dy.shape[1]))
    return transposed_ragged_dot_mgpu.transposed_ragged_dot(
        x,
        dy,
        group_sizes=sizes,
        block_m=tiles.rows,
        block_n=tiles.columns,
        block_k=64,
        max_concurrent_steps=tiles.steps,
        grid_block_n=tiles.turn,
    )
