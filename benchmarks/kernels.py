"""What one kernel of a compiled GPU program does: FLOPs, bytes of memory, and what they are for.

The bytes are those that a kernel must move: an array that it only cuts a part out of counts with
that part, and one that it updates in place with the update. Caches are not modelled.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Collection, Iterator

from benchmarks.hlo import HloProgram, Instruction
from models.grouped_matmul import product_tiles

Shape = tuple[int, ...]


class Use(enum.Enum):
    """Uses of time."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    OTHER = "other compute"
    SUMS = "gradient sums"
    WEIGHTS = "copies and casts of weights and gradient sums"
    WRITES = "writes of activations and residuals into slots"
    READS = "reads of them from slots"
    COPIES = "other copies of them"
    TRANSFERS = "exposed transfers"
    LAUNCHES = "launches"
    WAITS = "host waits"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel.

    Args:
      use: what it is for.
      flops: multiplications and additions of its matmuls; others are never what takes the time.
      bytes: read and written.
    """

    use: Use
    flops: int
    bytes: int


# Neither kernels nor transfers: names for parts of other arrays.
_FREE = frozenset(
    {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "call"}
)
_FREE |= {"after-all", "partition-id", "replica-id", "opt-barrier", "fusion-done"}
_CUTS = frozenset({"slice", "dynamic-slice", "gather"})
_RENAMES = frozenset({"bitcast", "reshape", "convert", "copy", "transpose"})
_ELEMENTWISE = frozenset(
    {"add", "and", "compare", "divide", "exponential", "log", "maximum", "minimum", "multiply",
     "negate", "or", "select", "subtract", "tanh"}
)  # fmt: skip
_MOVES = frozenset(
    {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "slice", "dynamic-slice",
     "dynamic-update-slice", "copy", "transpose", "convert", "reshape", "broadcast", "pad",
     "concatenate", "select", "iota", "fusion"}
)  # fmt: skip
_ALLOCATES = 'custom_call_target="AllocateBuffer"'  # XLA emits nothing for it
_PARAMETER = re.compile(r"parameter\((\d+)\)")
_GROUPED = 'custom_call_target="mosaic_gpu'  # models/grouped_matmul.py
_BLOCKS = 'custom_call_target="__gpu$xla.gpu.triton"'  # models/flash_kernels.py
_CUBLAS = re.compile(r'"__cublas\$(?:lt\$matmul|gemm)".*?"lhs_contracting_dimensions":\[([^\]]*)\]')
_ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha(\w*)"')


def is_kernel(row: Instruction) -> bool:
    """Whether an instruction of a computation that is not fused launches a kernel."""
    return row.opcode not in _FREE and _ALLOCATES not in row.text


def kernel(
    program: HloProgram, computation: str, row: Instruction, weights: Collection[Shape]
) -> Kernel:
    """Reads one kernel.

    Args:
      program: where it runs.
      computation: the computation that it is in.
      row: the instruction, for which `is_kernel` holds.
      weights: shapes of weights that are matrices, each sorted: they tell weights and their
        gradients from activations.
    """
    read = program.operands(computation, row)
    if found := _ATTENTION.search(row.text):
        moved = sum(sum(one.bytes) for one in (*read, row))
        return Kernel(Use.ATTENTION, _attention_flops(read, row, found[1]), moved)
    if _BLOCKS in row.text:
        moved = sum(sum(one.bytes) for one in (*read, row))
        return Kernel(Use.ATTENTION, _block_flops(read, row), moved)
    if _GROUPED in row.text:
        moved = sum(sum(one.bytes) for one in (*read, row))
        return Kernel(Use.MATMUL, _grouped_flops(read, row), moved)
    if _CUBLAS.search(row.text):  # on a GPU; without one, matmuls are fusions
        moved = sum(sum(one.bytes) for one in read) + row.bytes[0]
        return Kernel(Use.MATMUL, _cublas_flops(program, computation, row), moved)
    if row.opcode in ("fusion", "fusion-start"):
        inside = row.calls["calls"]
        flops = program.dot_flops(inside)
        moved, written = _fusion_bytes(program, inside, read)
        for one in filter(lambda one: _CUBLAS.search(one.text), program.computations[inside]):
            flops += _cublas_flops(program, inside, one)  # slices are read and written in place
            moved -= one.bytes[-1]  # its work space
    else:
        flops = program.flops_of_dot(computation, row) if row.opcode == "dot" else 0
        written = [(row, sum(row.bytes))]
        cut = row.opcode in _CUTS
        moved = sum(row.bytes) + (sum(row.bytes) if cut else sum(sum(one.bytes) for one in read))
        if row.opcode == "dynamic-update-slice":
            moved, written = 2 * sum(read[1].bytes), [(read[1], sum(read[1].bytes))]
    return Kernel(_use(program, row, flops, [one for one, _ in written], weights), flops, moved)


def _cublas_flops(program: HloProgram, computation: str, row: Instruction) -> int:
    found, left = _CUBLAS.search(row.text), program.operands(computation, row)[0]
    assert found is not None
    summed = math.prod(left.shapes[0][int(dim)] for dim in re.findall(r"\d+", found[1]))
    return 2 * math.prod(row.shapes[0]) * summed


def _use(
    program: HloProgram,
    row: Instruction,
    flops: int,
    written: list[Instruction],
    weights: Collection[Shape],
) -> Use:
    if flops:
        return Use.MATMUL
    inside = [
        one for called in row.calls.values() for one in program.reached(called, into_loops=True)
    ]
    computes = any(
        one.opcode not in _MOVES and any(map(math.prod, one.shapes)) and _is_array(one)
        for one in inside or [row]
    )
    of_weights = any(
        tuple(sorted(n for n in shape if n != 1)) in weights
        for one in written
        for shape in one.shapes
    )
    if computes:
        return Use.SUMS if of_weights else Use.OTHER
    if of_weights:
        return Use.WEIGHTS
    opcodes = {one.opcode for one in inside or [row]}
    if "dynamic-update-slice" in opcodes:
        return Use.WRITES
    return Use.READS if "dynamic-slice" in opcodes else Use.COPIES


def _is_array(row: Instruction) -> bool:
    return any(math.prod(shape) > 1 for shape in row.shapes)


def _fusion_bytes(
    program: HloProgram, inside: str, read: list[Instruction]
) -> tuple[int, list[tuple[Instruction, int]]]:
    """Bytes that a fusion reads and writes, and what it writes."""
    rows = program.computations[inside]
    by_name = {one.name: one for one in rows}
    users: dict[str, list[Instruction]] = {}
    for one in rows:
        for name in one.operands:
            users.setdefault(name, []).append(one)
    written = [(one, _written(one, by_name)) for one in _roots(rows, by_name)]
    moved = sum(size for _, size in written)
    for one in rows:
        if one.opcode == "parameter":
            moved += _read(program, one, users)
    return moved, [(_update(one, by_name), size) for one, size in written]


def _roots(rows: list[Instruction], by_name: dict[str, Instruction]) -> Iterator[Instruction]:
    root = rows[-1]
    for one in [by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]:
        while one.opcode == "bitcast":
            one = by_name[one.operands[0]]
        yield one


def _update(row: Instruction, by_name: dict[str, Instruction]) -> Instruction:
    return by_name[row.operands[1]] if row.opcode == "dynamic-update-slice" else row


def _written(row: Instruction, by_name: dict[str, Instruction]) -> int:
    return sum(_update(row, by_name).bytes)


def _read(program: HloProgram, row: Instruction, users: dict[str, list[Instruction]]) -> int:
    """Bytes that a fused computation reads of one of its parameters."""
    size = sum(row.bytes)
    itemsize = size // max(1, sum(map(math.prod, row.shapes)))
    parts = 0
    missing = [(row.name, user) for user in users.get(row.name, [])]
    while missing:
        name, user = missing.pop()
        if user.opcode in _RENAMES | _ELEMENTWISE:
            if user.name not in users:  # what the fusion writes
                return size
            missing.extend((user.name, later) for later in users[user.name])
        elif user.opcode in _CUTS and user.operands[0] == name:
            parts += sum(map(math.prod, user.shapes)) * itemsize
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            continue
        else:
            return size
    return min(size, parts)


def _attention_flops(read: list[Instruction], row: Instruction, kind: str) -> int:
    """Two matmuls forward and five backward (Dao et al. 2022, algorithms 1 and 4), half of their
    products if the mask is causal."""
    _, length, _, _ = read[1].shapes[0]  # of the keys: rows, length, heads, head width
    matmuls = 5 if kind.endswith("Backward") else 2
    return 2 * matmuls * math.prod(row.shapes[0]) * length // (2 if "CAUSAL" in row.text else 1)


def _block_flops(read: list[Instruction], row: Instruction) -> int:
    """A kernel of `models.flash_kernels`, for causal queries of one document: two matmuls forward,
    three for the gradients of queries, and four for those of keys and of values."""
    matmuls = {(4, 3): 2, (4,): 3, (4, 4): 4}[tuple(map(len, row.shapes))]
    queries, (_, length, _, _) = (one.shapes[0] for one in read[:2])
    return 2 * matmuls * math.prod(queries) * length // 2


def _grouped_flops(read: list[Instruction], row: Instruction) -> int:
    """A grouped matmul of `models.grouped_matmul`, or of its kernels' gradients: all tiles of rows,
    and one more for each group but the first, which shares a tile with the group before."""
    (num_groups,), *_ = read[0].shapes
    left, right = (one.shapes[0] for one in read[-2:])
    of_kernels = len(row.shapes[0]) == 3
    num_rows, width = left
    other = right[-1] if of_kernels else row.shapes[0][1]
    product = product_tiles(num_rows, num_groups, width, other)
    rows = 64 if of_kernels else product.rows
    tiles = -(-num_rows // rows) + num_groups - 1
    return 2 * tiles * rows * width * other
