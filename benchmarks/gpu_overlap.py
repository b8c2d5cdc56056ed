"""Do a layer's collectives run beside matmuls, and what would it take? Needs no GPU, runs nothing.

Compiles F of one microbatch and B of another for the layers of a stage, on the meshes of
`benchmarks/gpu_large.py`: each in a loop over layers of its own, as a tick runs them, and both in
one loop. For every gather, scatter and exchange of more than a megabyte, the matmuls that the
compiled program starts between its start and its end are counted; none of them depends on it.

    .venv-gpu/bin/python benchmarks/gpu_overlap.py --model mixture-67b
    .venv-gpu/bin/python benchmarks/gpu_overlap.py --model llama-70b
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpipe
from benchmarks import gpu_large
from benchmarks.hlo import HloProgram, Instruction
from jaxpipe.planning.without_devices import use_gpu_flags
from jaxpipe.runtime.measure import traced

LAYERS = 4
LARGE = 1e6
"""Bytes of a collective that counts."""


def compiled(pipe: jaxpipe.Pipeline, batch: Any, *, together: bool) -> HloProgram:
    """F and B of a stage's layers, in one loop or in two."""
    layers, context = traced.layers(pipe, batch, None)
    kind = layers.kinds[0]
    split, x, y = kind.split, *(layers.activations[n] for n in (kind.x, kind.y))

    def every(tree: Any) -> Any:
        return jax.tree.map(lambda w: jax.ShapeDtypeStruct((LAYERS, *w.shape), w.dtype), tree)

    def shapes(tree: Any) -> Any:  # without the mesh that they are traced in
        return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), tree)

    def at(tree: Any, n: Any) -> Any:
        return jax.tree.map(lambda w: w[n], tree)

    def put(kept: Any, new: Any, n: Any) -> Any:
        return jax.tree.map(
            lambda a, w: lax.dynamic_update_index_in_dim(a, w, n, 0), kept, list(new)
        )

    def run(params: Any, x: Any, dy: Any, saved: Any, room: Any, context: Any, count: Any) -> Any:
        def forward(n: Any, through: Any) -> Any:
            x, until_b, until_w = through
            x, *new = split.forward(at(params, n), x, *context)
            x = x.x if isinstance(x, jaxpipe.WithLoss) else x
            return x, put(until_b, new[0], n), put(until_w, new[1], n)

        def backward(n: Any, through: Any) -> Any:
            (dy, crossing), n = through, LAYERS - 1 - n
            dx, new = split.backward_input(at(params, n), *at(saved, n), dy, *context)
            return dx, put(crossing, new, n)

        def both(n: Any, through: Any) -> Any:
            return forward(n, through[0]), backward(n, through[1])

        ends = (x, *room[:2]), (dy, room[2])
        if together:
            return lax.fori_loop(0, count, both, ends)
        one, other = ends
        return lax.fori_loop(0, count, forward, one), lax.fori_loop(0, count, backward, other)

    params = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), pipe.layout.layers.local.shape_of(0)
    )
    kept = every([list(split.until_b), list(split.until_w), list(split.crossing)])
    args = every(params), *shapes((x, y)), kept[:2], kept, shapes(context)
    step = jax.jit(pipe.shard_map(run, P(), P()))
    text = step.lower(*args, jax.ShapeDtypeStruct((), jnp.int32)).compile().as_text()
    assert text is not None
    return HloProgram(text)


def is_matmul(program: HloProgram, row: Instruction) -> bool:
    """Whether an instruction multiplies matrices, in a fusion or as a call of a library."""
    if row.opcode == "custom-call":
        return "gemm" in row.text.partition("custom_call_target=")[2].split(",")[0]
    called = program.computations.get(row.calls.get("calls", ""), [])
    return any(one.opcode == "dot" for one in [row, *called])


def overlaps(program: HloProgram) -> list[tuple[str, str, int, int]]:
    """For every large collective of a loop: loop, opcode, bytes, matmuls between start and end."""
    found = []
    for name, rows in program.computations.items():
        for k, start in enumerate(rows):
            if not start.opcode.endswith("-start") or max(start.bytes) < LARGE:
                continue
            end = next(n for n in range(k + 1, len(rows)) if start.name in rows[n].operands)
            matmuls = sum(is_matmul(program, row) for row in rows[k + 1 : end])
            found.append((name, start.opcode.removesuffix("-start"), max(start.bytes), matmuls))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=gpu_large.MODELS, default="mixture-67b")
    args = parser.parse_args()
    use_gpu_flags()
    config, sizes = gpu_large.MODELS[args.model]
    pipe = gpu_large.pipeline(config, sizes, schedule="zb-h1", microbatches=32, zero=0)
    shape = sizes["data"] * 32, config.sequence_length + 1
    batch = {"tokens": jax.ShapeDtypeStruct(shape, "int32")}
    for together in (False, True):
        print("F and B in one loop" if together else "F and B in loops of their own", flush=True)
        for loop, opcode, size, matmuls in overlaps(compiled(pipe, batch, together=together)):
            print(f"  {loop}: {opcode} of {size / 1e6:.1f} MB beside {matmuls} matmuls", flush=True)


if __name__ == "__main__":
    main()
