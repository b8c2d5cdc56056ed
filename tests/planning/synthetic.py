"""A model of equal layers, in round numbers; with full rematerialization B runs F again."""

from jaxpipe.planning.sizes import Kernel, LayerSizes, Linear, ModelSizes, Pass, Sizes, Variant

NONE, FULL = Variant(1, 1, "none"), Variant(1, 1, "full")
NOTHING = Linear(0, 0)


def synthetic(*variants: Variant, layers: int = 4, width: int = 4096) -> ModelSizes:
    """The model in these variants, by default with and without rematerialization."""
    weights, vocabulary = 12 * width**2, 32000 * width
    activation = Linear(0, 2 * 2048 * width)

    def matmuls(times: int = 1) -> Pass:
        flops = Linear(0, 2.0 * times * weights * 2048)
        return Pass((Kernel(flops, Linear(2.0 * weights, 0)),), NOTHING, ())

    def sizes(remat: str) -> Sizes:
        times, kept = (2, 1) if remat == "full" else (1, 16)
        until = Linear(0, kept * activation.per_row)
        layer = LayerSizes(
            *(matmuls(), matmuls(times), matmuls(), weights),
            *(until, NOTHING, activation, until, ((12 * width, width),)),
        )
        outer = vocabulary, vocabulary
        return Sizes((layer,), (0,) * layers, *[activation] * 2, *outer, matmuls(), activation)

    found = {variant: sizes(variant.remat) for variant in variants or (NONE, FULL)}
    return ModelSizes("synthetic", 2048, 4, 2, 2, 32, 8192, found)
