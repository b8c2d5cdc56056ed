"""A GPT that reads images: a vision transformer and a projector in front of its layers.

    image = patches @ kernel + positions of the patch and of the image
    image = image + attention(norm(image)), image = image + mlp(norm(image))   encoder layers
    x = [projector(norm(image)), text]                                         the projector
    x = layers of the GPT, and its loss over the text

(Dosovitskiy et al. 2021; the projector is that of Liu et al. 2024, section 3.3.) ``{"image",
"text"}`` travels from the embedding to the projector, where they meet: from there on a row is one
sequence, its images before its text. A row has at most ``max_images`` images and begins with
padding in place of the others. To the GPT, the padding is a document of its own.

Dimension suffixes: B rows, N images of a row, P patches of an image, C numbers of a patch, L all
tokens of a row, E width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe import Model, Weighted
from jaxpipe.errors import Problem
from jaxpipe.nnx import functional
from models import gpt, validation
from models.blocks import INIT_STDDEV, MLP, Attention, Linear, function_of, layer_norm
from models.gpt_config import GPTConfig
from models.types import Batch, Key, PyTree

WITHOUT = ("adapters", "mtp_loss", "bias_speed", "qk_clip", "residual_streams")
"""Options of a GPT that need layers with states or of several streams, or alike ones."""


@dataclasses.dataclass(frozen=True)
class VisionLanguageConfig(GPTConfig):
    """The shape of a GPT with images: fields of the GPT, and of what is in front of its layers.

    Args:
      image_size: height and width of the images.
      channels: colors of a pixel.
      patch_size: height and width of the patches into which an image is cut; a divisor.
      max_images: most images of a row.
      num_encoder_layers: layers of the image encoder.
      encoder_width: size of its residual stream, a multiple of ``encoder_heads``.
      encoder_heads: its attention heads.
      hide_images: make all images padding, to see what the text alone tells.
    """

    image_size: int = 8
    channels: int = 1
    patch_size: int = 4
    max_images: int = 4
    num_encoder_layers: int = 2
    encoder_width: int = 64
    encoder_heads: int = 4
    hide_images: bool = False

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        names = "image_size", "channels", "patch_size", "max_images", "num_encoder_layers"
        small = validation.small_counts(self, *names, "encoder_width", "encoder_heads")
        yield from small
        for name in WITHOUT:
            default = getattr(type(self), name)
            if (value := getattr(self, name)) != default:
                yield Problem(name, value, "does not go with images", (default,))
        if small:
            return
        for name, of in (("patch_size", "image_size"), ("encoder_heads", "encoder_width")):
            if (whole := getattr(self, of)) % getattr(self, name):
                yield validation.not_a_divisor(name, getattr(self, name), of, whole)

    @property
    def image_tokens(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class EncoderLayer(nnx.Module):
    """Attention between the patches of an image, then an MLP, each on a normalised copy."""

    def __init__(self, config: VisionLanguageConfig, rngs: nnx.Rngs):
        width = config.encoder_width
        self.attention = Attention(width, config.encoder_heads, stddev=None, rngs=rngs)
        self.mlp = MLP(width, 4 * width, activation=jax.nn.gelu, stddev=None, rngs=rngs)
        self.attention_norm, self.mlp_norm = (_norm(config, rngs) for _ in range(2))
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, image_BNPE: jax.Array) -> jax.Array:
        x = image_BNPE.reshape(-1, *image_BNPE.shape[2:])
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x.reshape(image_BNPE.shape)


class Projector(nnx.Module):
    """Makes tokens of a text out of an encoder's patches."""

    def __init__(self, config: VisionLanguageConfig, rngs: nnx.Rngs):
        self.norm = _norm(config, rngs)
        self.up = Linear(config.encoder_width, config.width, stddev=None, rngs=rngs)
        self.out = Linear(config.width, config.width, stddev=None, rngs=rngs)

    def __call__(self, image_BNPE: jax.Array) -> jax.Array:
        return self.out(jax.nn.gelu(self.up(self.norm(image_BNPE))))


def init(config: VisionLanguageConfig, rng: jax.Array) -> PyTree:
    """Initial parameters; works under `jax.jit` and `jax.eval_shape`.

    Returns:
      ``{"embed", "layers", "head"}``, float32; "layers" is a tuple: the encoder's layers, the
      projector, the GPT's layers.
    """
    gpt_rng, patches_rng, images_rng, *keys = jax.random.split(rng, 5 + config.num_encoder_layers)
    params = gpt.init(config, gpt_rng)
    of_gpt = params["layers"]
    if config.layers_are_alike:
        of_gpt = [jax.tree.map(lambda w, n=n: w[n], of_gpt) for n in range(config.num_layers)]
    makes = _patches, *[EncoderLayer] * config.num_encoder_layers, Projector
    patches, *layers = (
        functional(make(config, nnx.Rngs(key)))[1] for make, key in zip(makes, keys, strict=True)
    )

    def positions(key: jax.Array, count: int) -> jax.Array:
        return INIT_STDDEV * jax.random.normal(key, (count, config.encoder_width))

    of_images = {
        "patches": patches,
        "patch_positions": positions(patches_rng, config.image_tokens),
        "image_positions": positions(images_rng, config.max_images),
    }
    return params | {"embed": params["embed"] | of_images, "layers": (*layers, *of_gpt)}


def model(config: VisionLanguageConfig, *, vocabulary_axis: str | None = None) -> Model:
    """Makes the model as the functions that a pipeline runs.

    A microbatch has the arrays

    - ``images`` [rows, max_images, image_size, image_size, channels]: the last ``num_images`` of a
      row are its images, the others have no influence;
    - ``num_images``, int32 [rows]: 0 to ``max_images``;
    - ``tokens`` and ``targets``, int32 [rows, S], as of `models.gpt.model`.

    The loss is the mean over the tokens to predict of the whole batch. The metric "padding" is the
    share of images that are padding.

    Args:
      vocabulary_axis: as of `models.gpt.model`.

    Returns:
      The model; its layers are those of the encoder, the projector, and those of the GPT.

    Example:
      >>> config = VisionLanguageConfig(
      ...     vocab_size=64, sequence_length=5, num_layers=1, width=16, num_heads=2
      ... )
      >>> batch = {
      ...     "images": jnp.zeros((3, 4, 8, 8, 1)), "num_images": jnp.array([4, 0, 2]),
      ...     "tokens": jnp.zeros((3, 5), int), "targets": jnp.zeros((3, 5), int),
      ... }
      >>> x = model(config).embed(init(config, jax.random.key(0)), batch, None)
      >>> jax.tree.map(jnp.shape, x)
      {'image': (3, 4, 4, 64), 'text': (3, 5, 16)}
    """
    language = gpt.model(config, vocabulary_axis=vocabulary_axis)
    apply_patches, apply_encoder, apply_projector = (
        function_of(make, config) for make in (_patches, EncoderLayer, Projector)
    )

    def embed(outer: PyTree, microbatch: Batch, rng: Key) -> dict[str, jax.Array]:
        pixels_BNPC = _cut(config, microbatch["images"].astype(config.compute_dtype))
        own, num_images_B = outer["embed"], _num_images(config, microbatch)
        first_B1 = config.max_images - num_images_B[:, None]
        places_BN = jnp.arange(config.max_images) - first_B1  # padding counts as the first image
        positions_BNPE = own["image_positions"][places_BN.clip(0)][:, :, None]
        image_BNPE = apply_patches(own["patches"], pixels_BNPC)
        image_BNPE = (image_BNPE + own["patch_positions"] + positions_BNPE).astype(image_BNPE.dtype)
        return {"image": image_BNPE, "text": language.embed(outer, microbatch, rng)}

    def encoder(
        params: PyTree, x: dict[str, jax.Array], microbatch: Batch, rng: Key
    ) -> dict[str, jax.Array]:
        return x | {"image": apply_encoder(params, x["image"], rng=rng)}

    def projector(
        params: PyTree, x: dict[str, jax.Array], microbatch: Batch, rng: Key
    ) -> jax.Array:
        image_BNPE, text = apply_projector(params, x["image"]), x["text"]
        return jnp.concatenate([image_BNPE.reshape(len(text), -1, config.width), text], axis=1)

    def beside_padding(layer: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def run(params: PyTree, x_BLE: jax.Array, microbatch: Batch, rng: Key) -> PyTree:
            first_B = config.image_tokens * (config.max_images - _num_images(config, microbatch))
            documents_BL = jnp.arange(x_BLE.shape[1]) >= first_B[:, None]
            return layer(params, x_BLE, {"documents": documents_BL.astype(jnp.int32)}, rng)

        return run

    def head_loss(outer: PyTree, x_BLE: jax.Array, microbatch: Batch, rng: Key) -> PyTree:
        loss = language.head_loss(outer, _text(x_BLE, microbatch), microbatch, rng)
        num_images_B = _num_images(config, microbatch)
        most = jnp.float32(config.max_images * len(num_images_B))
        return loss, {"padding": Weighted(most - num_images_B.sum(), most)}

    of_gpt = language.layer
    if config.layers_are_alike:
        of_gpt = (of_gpt,) * config.num_layers
    functions = {layer: beside_padding(layer) for layer in set(of_gpt)}
    layers = *[encoder] * config.num_encoder_layers, projector, *(functions[f] for f in of_gpt)
    return Model(embed, layers, head_loss, stage_split=language.stage_split)


def logits(config: VisionLanguageConfig, params: PyTree, batch: Batch) -> jax.Array:
    """Plain forward pass on one device, without dropout; experts drop no tokens.

    Args:
      batch: as `model` describes a microbatch; the values of targets are not read.

    Returns:
      float32 [rows, S, vocab_size]: scores of the token after each position of the text.
    """
    config = gpt.for_inference(config)
    plain = model(config)
    x = plain.embed(params, batch, None)
    for layer, own in zip(plain.layer, params["layers"], strict=True):
        x = layer(own, x, batch, None)
    return gpt.scores(config, params, _text(x, batch))


def _text(x_BLE: jax.Array, microbatch: Batch) -> jax.Array:
    return x_BLE[:, -microbatch["tokens"].shape[1] :]


def _num_images(config: VisionLanguageConfig, microbatch: Batch) -> jax.Array:
    return microbatch["num_images"] * (0 if config.hide_images else 1)


def _cut(config: VisionLanguageConfig, images: jax.Array) -> jax.Array:
    """Cuts images [B, N, height, width, channels] into patches [B, N, P, C]."""
    num_rows, num_images, *_ = images.shape
    size, count = config.patch_size, config.image_size // config.patch_size
    cut = images.reshape(num_rows, num_images, count, size, count, size, config.channels)
    return cut.swapaxes(3, 4).reshape(num_rows, num_images, count**2, -1)


def _patches(config: VisionLanguageConfig, rngs: nnx.Rngs) -> Linear:
    numbers = config.patch_size**2 * config.channels
    return Linear(numbers, config.encoder_width, stddev=None, rngs=rngs)


def _norm(config: VisionLanguageConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return layer_norm(
        config.encoder_width, epsilon=config.norm_epsilon, dtype=config.compute_dtype, rngs=rngs
    )
