"""Cost of a layer's mixture of experts without a capacity.

Forward and backward, beside a mixture whose experts compute every token and beside a dense MLP as
wide as the chosen experts. On this machine, in float32: milliseconds, the least of several rounds
in turns. With ``--gpu``, in bfloat16 and compiled for one H100 that need not exist: milliseconds at
the roofline (`benchmarks/roofline.py`). FLOPs are those of matmuls, as multiples of those that the
chosen experts need.

    python -m benchmarks.grouped_experts
    .venv-gpu/bin/python -m benchmarks.grouped_experts --gpu
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from benchmarks.hlo import HloProgram
from benchmarks.kernels import is_kernel, kernel
from benchmarks.roofline import Roofline, total
from jaxpipe.planning.without_devices import attention_of_gpus, gpus, use_gpu_flags
from models import experts, gpt, gpt_block
from models.blocks import function_of
from models.grouped_matmul import Blocks
from models.sharing import WHOLE

ROUNDS = 7
Layer = Callable[[Any, jax.Array], jax.Array]


class Case(NamedTuple):
    """Tokens of a width, and experts of a hidden width of which each token is sent to some."""

    tokens: int
    width: int
    experts: int
    chosen: int
    hidden: int

    @property
    def needed_flops(self) -> float:
        """Three kernels, each in F, B and W."""
        return 2.0 * 9 * self.tokens * self.chosen * self.width * self.hidden


CPU_CASES = Case(1024, 256, 8, 2, 256), Case(1024, 256, 64, 6, 96)
GPU_CASES = Case(4096, 2048, 8, 2, 2752), Case(4096, 2048, 64, 6, 1408)


def layers(case: Case, dtype: str) -> dict[str, tuple[Layer, Any]]:
    """The layers by name, each with the function that draws its parameters."""
    config = gpt.GPTConfig(
        vocab_size=64, sequence_length=case.tokens, num_layers=1, width=case.width, num_heads=8,
        num_experts=case.experts, experts_per_token=case.chosen, expert_width=case.hidden,
        dtype=dtype,
    )  # fmt: skip
    wide = {"num_experts": None, "expert_width": None, "mlp_width": case.chosen * case.hidden}
    dense = dataclasses.replace(config, experts_per_token=2, **wide)

    def draw(config: gpt.GPTConfig) -> Any:
        drawn = gpt.init(config, jax.random.key(0))["layers"]["mlp"]
        return jax.tree.map(lambda leaf: leaf[0].astype(dtype), drawn)

    def make_mlp(config: gpt.GPTConfig, rngs: nnx.Rngs) -> gpt_block.MLP:
        return gpt_block.MLP(config, config.hidden_width, tensor=WHOLE.tensor, rngs=rngs)

    mixture = function_of(gpt_block.make_mixture, config)
    params = functools.partial(draw, config)
    return {
        "grouped": (lambda params, x: mixture(params, x)[0], params),
        "every token": (functools.partial(every_token, config), params),
        "dense": (function_of(make_mlp, dense), functools.partial(draw, dense)),
    }


def routing(config: gpt.GPTConfig, params: Any, x: jax.Array) -> experts.Routing:
    router = function_of(lambda config, rngs: experts.Router(config, WHOLE, rngs=rngs), config)
    return router(params["router"], x[0])


def every_token(config: gpt.GPTConfig, params: Any, x: jax.Array) -> jax.Array:
    """The mixture whose experts compute every token, and weigh those that were not sent by 0."""
    chosen, scores, _ = routing(config, params, x)
    kernels = {name: leaf["kernel"] for name, leaf in params["experts"].items()}
    is_chosen = jax.nn.one_hot(chosen, config.num_experts)
    weights = jnp.einsum("tk,tkx->tx", scores, is_chosen).astype(x.dtype)
    up, gate = (jnp.einsum("te,xef->txf", x[0], kernels[name]) for name in ("up", "gate"))
    hidden = jax.nn.silu(gate) * up * weights[..., None]
    return jnp.einsum("txf,xfe->te", hidden, kernels["down"])[None]


def gradients(layer: Layer) -> Callable[..., Any]:
    def run(params: Any, x: jax.Array, dy: jax.Array) -> Any:
        y, vjp = jax.vjp(layer, params, x)
        return y, vjp(dy)

    return jax.jit(run)


def on_this_machine(case: Case) -> dict[str, tuple[float, float]]:
    """Milliseconds, and FLOPs of what is needed."""
    x, dy = (jax.random.normal(jax.random.key(n), (1, case.tokens, case.width)) for n in (1, 2))
    runs, flops, sizes = {}, {"dense": 1.0, "every token": case.experts / case.chosen}, None
    for name, (layer, draw) in layers(case, "float32").items():
        params = draw()
        runs[name] = functools.partial(gradients(layer), params, x, dy)
        jax.block_until_ready(runs[name]())
        if sizes is None:
            logits = x[0] @ params["router"]["kernel"]
            chosen = jax.lax.top_k(logits, case.chosen)[1].reshape(-1)
            sizes = jnp.bincount(chosen, length=case.experts)
            blocks = Blocks.of(sizes, chosen.size)
            flops[name] = float(blocks.num_used * blocks.rows / chosen.size)
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            best[name] = min(best[name], time.perf_counter() - began)
    return {name: (1e3 * seconds, flops[name]) for name, seconds in best.items()}


def for_an_h100(case: Case) -> dict[str, tuple[float, float]]:
    """The same from programs that are compiled for one, at the roofline."""
    found = {}
    sharding = SingleDeviceSharding(gpus("h100", 1)[0])
    for name, (layer, draw) in layers(case, "bfloat16").items():
        x = jax.ShapeDtypeStruct((1, case.tokens, case.width), jnp.bfloat16, sharding=sharding)
        params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(draw),
        )
        with attention_of_gpus():
            lowered = gradients(layer).lower(params, x, x)
        program = HloProgram(lowered.compile().as_text())
        rows = program.computations[program.entry]
        kernels = [kernel(program, program.entry, row, ()) for row in rows if is_kernel(row)]
        router = 6.0 * case.tokens * case.width * case.experts * (name != "dense")
        flops = (sum(one.flops for one in kernels) - router) / case.needed_flops
        found[name] = 1e3 * total(Roofline(program, ()).body(program.entry)), flops
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="compile for an H100")
    options = parser.parse_args()
    if options.gpu:
        use_gpu_flags()
    table = Table("tokens", "width", "experts", "chosen", "hidden", "layer", "ms", "FLOPs")
    for case in GPU_CASES if options.gpu else CPU_CASES:
        found = for_an_h100(case) if options.gpu else on_this_machine(case)
        for name, (milliseconds, flops) in found.items():
            table.add_row(*map(str, case), name, f"{milliseconds:.2f}", f"{flops:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
