"""A mixture of experts in place of a layer's MLP (Shazeer et al. 2017; Fedus et al. 2022).

    chosen, scores = router(x)                [tokens, chosen experts]
    y = sum over chosen experts of score * expert(x)   [+ shared(x)]

Shapes do not depend on the routing. Without a capacity, choices are sorted by expert and multiplied
group by group (`models.grouped_matmul`): nothing is dropped, and nothing computed that was not
chosen. With a capacity, an expert or a device has room for so many tokens, and tokens that find no
room are dropped. Devices along a mesh axis may hold some of the experts each, in the first
dimension of the kernels, and then exchange tokens.

Dimension suffixes: T tokens of a device, D tokens that a device gets of all devices, X experts, Y
experts of a device, K chosen experts, P places for choices, C places of an expert for tokens of a
device, E width, F hidden width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.blocks import GATED, INIT_STDDEV, UNGATED, Linear, einsum, matmul
from models.gpt_config import GPTConfig
from models.grouped_matmul import grouped_matmul
from models.sharing import Sharing


class Routing(NamedTuple):
    """The router's decisions for a group of tokens.

    Args:
      chosen: int32 [tokens, chosen experts], the best first.
      scores: float32 of the same shape: factors by which these experts' outputs are multiplied.
      loss: loss of the layer, float32; None if the config asks for none.
    """

    chosen: jax.Array
    scores: jax.Array
    loss: jax.Array | None


class Balance(nnx.Variable[jax.Array]):
    """An array of a router that no gradient changes."""


class Router(nnx.Module):
    """Chooses experts for every token by their scores, which are computed in float32.

    With ``config.bias_speed``, ``bias`` is added to the scores only for the choice, and ``counts``
    adds up how often every expert is chosen.

    Args:
      sharing: the devices that have some of a microbatch's tokens each.
    """

    def __init__(self, config: GPTConfig, sharing: Sharing, *, rngs: nnx.Rngs):
        assert config.num_experts is not None
        self.config, self.sharing = config, sharing
        shape = (config.width, config.num_experts)
        self.kernel = nnx.Param(INIT_STDDEV * jax.random.normal(rngs.params(), shape))
        self.bias = nnx.data(None)
        if config.expert_bias:
            self.bias = nnx.Param(jnp.zeros(config.num_experts))
        if config.bias_speed is not None:
            self.selection = nnx.Dict(
                bias=Balance(jnp.zeros(config.num_experts)),
                counts=Balance(jnp.zeros(config.num_experts)),
            )

    def __call__(self, x_TE: jax.Array) -> Routing:
        config = self.config
        logits_TX = x_TE.astype(jnp.float32) @ self.kernel[...]
        if self.bias is not None:
            logits_TX = logits_TX + self.bias[...]
        sigmoid = config.router == "sigmoid"
        scores_TX = jax.nn.sigmoid(logits_TX) if sigmoid else jax.nn.softmax(logits_TX)
        chosen_TK = self._chosen(scores_TX)
        scores_TK = jnp.take_along_axis(scores_TX, chosen_TK, axis=-1)
        if config.normalized_scores:
            scores_TK = scores_TK / scores_TK.sum(axis=-1, keepdims=True)
        scores_TK = config.score_factor * scores_TK
        if not config.has_layer_losses:
            return Routing(chosen_TK, scores_TK, None)
        shares_TX = scores_TX / scores_TX.sum(axis=-1, keepdims=True)
        is_chosen_TX = jax.nn.one_hot(chosen_TK, logits_TX.shape[-1]).sum(axis=1)
        means = (self.sharing.mean(x.mean(axis=0)) for x in (shares_TX, is_chosen_TX))
        balance = balance_loss(*means)
        z_loss = jnp.mean(jax.nn.logsumexp(logits_TX, axis=-1) ** 2)
        loss = config.balance_loss * balance + config.z_loss * z_loss
        return Routing(chosen_TK, scores_TK, loss)

    def _chosen(self, scores_TX: jax.Array) -> jax.Array:
        config = self.config
        if config.bias_speed is not None:
            scores_TX = scores_TX + self.selection.bias[...]
        if config.groups_per_token < config.expert_groups:
            groups = config.expert_groups, config.groups_per_token, config.choices_per_group
            scores_TX = in_best_groups(scores_TX, *groups)
        _, chosen_TK = lax.top_k(scores_TX, config.experts_per_token)
        if config.bias_speed is not None:
            counts = self.selection.counts
            counts[...] += jnp.bincount(chosen_TK.reshape(-1), length=scores_TX.shape[-1])
        return chosen_TK


def in_best_groups(
    scores_TX: jax.Array, num_groups: int, num_best: int, num_choices: int = 2
) -> jax.Array:
    """Makes scores minus infinity outside each token's best groups (DeepSeek-V3, section 2.1.2).

    A group of experts that follow one another is as good as its best ``num_choices`` together.

    Example:
      >>> in_best_groups(jnp.array([[0.5, 0.0, 0.25, 0.5]]), 2, 1).tolist()
      [[-inf, -inf, 0.25, 0.5]]
    """
    scores_TGX = scores_TX.reshape(len(scores_TX), num_groups, -1)
    best, _ = lax.top_k(scores_TGX, min(num_choices, scores_TGX.shape[-1]))
    _, groups = lax.top_k(best.sum(axis=-1), num_best)
    is_best_TG = jax.nn.one_hot(groups, num_groups, dtype=bool).any(axis=1)
    return jnp.where(is_best_TG[..., None], scores_TGX, -jnp.inf).reshape(scores_TX.shape)


def moved_bias(bias_X: jax.Array, counts_X: jax.Array, speed: float) -> jax.Array:
    """Moves the biases of experts chosen too rarely up and of others down (Wang et al. 2024).

    Example:
      >>> moved_bias(jnp.zeros(3), jnp.array([4, 1, 1]), 0.5).tolist()
      [-0.5, 0.5, 0.5]
    """
    return bias_X + speed * jnp.sign(counts_X.mean() - counts_X)


def balance_loss(share_X: jax.Array, use_X: jax.Array) -> jax.Array:
    """Multiplies mean share by mean use, summed, times the experts (Fedus et al. 2022, eq. 4).

    If all experts are used alike, the loss is the number of experts per token.
    """
    return len(share_X) * jnp.sum(share_X * use_X)


class Room(NamedTuple):
    """The places that experts have for tokens, and the tokens that take them.

    Token t's choice k has the number t K + k. Places are numbered in the order of ``pairs``.

    Args:
      pairs: int32, the number of the token's choice in each place; the number behind the last one
        where a place is empty. [experts, capacity], or [places] in the order of their experts.
      places: int32 [tokens, chosen experts], the number of each choice's place; the number behind
        the last one where it has none.
    """

    pairs: jax.Array
    places: jax.Array


def room(chosen_TK: jax.Array, num_experts: int, capacity: int) -> Room:
    """Gives places to first choices first (Lepikhin et al. 2021), of tokens in their order.

    Choices of the number ``num_experts`` get no place.

    Example:
      >>> room(jnp.array([[0, 1], [0, 1], [1, 0]]), 2, 2).places.tolist()
      [[0, 3], [1, 4], [2, 4]]
    """
    num_choices = chosen_TK.shape[1]
    chosen = chosen_TK.T.reshape(-1)
    is_chosen = jax.nn.one_hot(chosen, num_experts, dtype=jnp.int32)
    before = jnp.cumsum(is_chosen, axis=0) - is_chosen
    rank = jnp.sum(before * is_chosen, axis=1)
    outside = num_experts * capacity
    places_TK = jnp.where(rank < capacity, chosen * capacity + rank, outside)
    places_TK = places_TK.reshape(num_choices, -1).T
    pairs = jnp.full(outside, chosen.size, jnp.int32)
    pairs = pairs.at[places_TK.reshape(-1)].set(jnp.arange(chosen.size), mode="drop")
    return Room(pairs.reshape(num_experts, capacity), places_TK)


def shared_room(
    chosen_TK: jax.Array, num_experts: int, capacity: int | None = None
) -> tuple[Room, jax.Array]:
    """Sorts choices by expert, and counts those of each.

    Args:
      chosen_TK: experts; numbers from ``num_experts`` on are others', and get no place here.
      num_experts: how many share the places.
      capacity: the most places, those of the first experts; None for as many as tokens can choose.

    Returns:
      The room, and int32 [experts], how many of its places are each expert's.

    Example:
      >>> places, sizes = shared_room(jnp.array([[1, 0], [2, 1]]), 2)
      >>> places.pairs.tolist(), places.places.tolist(), sizes.tolist()
      ([1, 0, 3, 4], [[1, 0], [4, 2]], [1, 2])
    """
    num_tokens, num_choices = chosen_TK.shape
    num_places = num_tokens * min(num_choices, num_experts)
    chosen = chosen_TK.reshape(-1)
    sizes = jnp.bincount(chosen, length=num_experts).astype(jnp.int32)
    if capacity is not None and capacity < num_places:
        num_places = capacity
        sizes = jnp.diff(jnp.minimum(jnp.cumsum(sizes), capacity), prepend=0)
    pairs = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    numbers = jnp.arange(chosen.size, dtype=jnp.int32)
    places = jnp.zeros_like(pairs).at[pairs].set(numbers, unique_indices=True)
    places_TK = jnp.where(
        chosen_TK < num_experts,
        jnp.minimum(places.reshape(chosen_TK.shape), num_places),
        num_places,
    )
    is_taken = numbers[:num_places] < sizes.sum()
    return Room(jnp.where(is_taken, pairs[:num_places], chosen.size), places_TK), sizes


def token_room(places: Room, num_experts: int) -> Room:
    """Makes a room with the places of each token next to each other: so many have one at most."""
    num_choices = places.places.shape[1]
    most = min(num_choices, num_experts)
    places_TK = jnp.sort(places.places, axis=1)[:, :most]
    return Room(places.pairs // num_choices * most, places_TK)


def device_room(
    chosen_TK: jax.Array, num_own: int, num_devices: int, capacity: int
) -> tuple[Room, jax.Array]:
    """Gives a token one place at each device of its experts, however many of them it chose there.

    Args:
      chosen_TK: experts; each device has the next ``num_own`` of them.
      num_devices: how many there are.
      capacity: places that a device has for these tokens.

    Returns:
      The room of devices in place of experts, and how many choices are without a place.

    Example:
      >>> places, lost = device_room(jnp.array([[1, 0], [3, 1], [0, 2]]), 2, 2, 2)
      >>> places.places.tolist(), int(lost)
      ([[0, 4], [2, 4], [1, 3]], 1)
    """
    devices_TK = chosen_TK // num_own
    first_TK = jnp.argmax(devices_TK[:, :, None] == devices_TK[:, None, :], axis=-1)
    is_first_TK = first_TK == jnp.arange(chosen_TK.shape[1])
    places = room(jnp.where(is_first_TK, devices_TK, num_devices), num_devices, capacity)
    found_TK = jnp.take_along_axis(places.places, first_TK, axis=1)
    return places, jnp.count_nonzero(found_TK == num_devices * capacity)


@jax.custom_vjp
def sent(rows: jax.Array, places: Room) -> jax.Array:
    """Gives each place the row of its token; empty ones get zeros.

    The transpose of `returned`: both directions gather, and nothing is scattered.
    """
    return _take(rows, places.pairs // places.places.shape[1])


@jax.custom_vjp
def returned(rows: jax.Array, places: Room) -> jax.Array:
    """Sums for each token the rows in the places of its choices."""
    rows = rows.reshape(-1, *rows.shape[places.pairs.ndim :])
    return _take(rows, places.places).sum(axis=1)


sent.defvjp(lambda *args: (sent(*args), args[1]), lambda places, dy: (returned(dy, places), None))
returned.defvjp(
    lambda *args: (returned(*args), args[1]), lambda places, dy: (sent(dy, places), None)
)


def sent_scores(scores_TK: jax.Array, places: Room) -> jax.Array:
    """Gives each place the score of its choice."""
    return sent(scores_TK.reshape(-1), Room(places.pairs, places.places.reshape(-1, 1)))


def _take(rows: jax.Array, numbers: jax.Array) -> jax.Array:
    """Takes rows by their numbers; the number behind the last one gives zeros."""
    return jnp.take(rows, numbers, axis=0, mode="fill", fill_value=0)


class _ExpertLinear(nnx.Module):
    """One matrix per expert, [experts, in, out], and one vector with ``config.expert_bias``."""

    def __init__(self, config: GPTConfig, shape: tuple[int, int], stddev: float, *, rngs: nnx.Rngs):
        count = config.num_experts
        assert count is not None
        self.kernel = nnx.Param(stddev * jax.random.normal(rngs.params(), (count, *shape)))
        has_bias = config.expert_bias
        self.bias = nnx.Param(jnp.zeros((count, shape[1]))) if has_bias else nnx.data(None)


class Experts(nnx.Module):
    """The MLPs of all experts.

    Args:
      axis: mesh axis whose devices have some of the experts each; None for all.
    """

    def __init__(self, config: GPTConfig, axis: str | None, *, rngs: nnx.Rngs):
        count, width, hidden = config.num_experts, config.width, config.expert_hidden_width
        assert count is not None
        self.config, self.count, self.axis = config, count, axis
        self.up = _ExpertLinear(config, (width, hidden), INIT_STDDEV, rngs=rngs)
        self.gate = (
            _ExpertLinear(config, (width, hidden), INIT_STDDEV, rngs=rngs)
            if config.activation in GATED
            else nnx.data(None)
        )
        self.down = _ExpertLinear(config, (hidden, width), config.residual_stddev, rngs=rngs)

    def __call__(self, x_TE: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array | None]:
        """Sums the experts' outputs by their scores; also returns the share of choices that find no
        room, or None without a capacity."""
        if self.config.capacity_factor is None:
            return self._of_sorted_choices(x_TE, routing)
        capacity = self.config.expert_capacity(len(x_TE))
        places = room(routing.chosen, self.count, capacity)
        dropped = jnp.mean(places.places == places.pairs.size, dtype=jnp.float32)
        return self._of_chosen_tokens(x_TE, routing, places), dropped

    def _of_sorted_choices(
        self, x_TE: jax.Array, routing: Routing
    ) -> tuple[jax.Array, jax.Array | None]:
        """Computes the choices of this device's experts among the tokens that it gets, and sums up
        each token's outputs where it came from."""
        num_own = len(self.up.kernel[...])
        capacity = self.config.device_capacity(len(x_TE))
        there, lost = None, jnp.int32(0)
        if self.axis is not None and capacity is not None:
            num_devices = self.count // num_own
            num_sent = self.config.device_tokens(len(x_TE), num_devices)
            there, lost = device_room(routing.chosen, num_own, num_devices, num_sent)
        x_DE, chosen_DK, scores_DK = self._tokens_of_all(x_TE, routing, there)
        places, sizes_Y = shared_room(chosen_DK, num_own, capacity)
        expected = min(routing.chosen.size, len(places.pairs))
        if num_own < self.count:  # some places may be empty
            expected = min(expected, len(places.pairs) - 1)
        dropped = None
        if capacity is not None:
            num_dropped = lost + jnp.count_nonzero(chosen_DK < num_own) - sizes_Y.sum()
            dropped = jnp.float32(num_dropped) / routing.chosen.size

        tokens = token_room(places, num_own)
        x_PE = sent(x_DE, tokens)
        scores_P1 = sent_scores(scores_DK, places)[:, None].astype(x_TE.dtype)
        numbers_P = jnp.arange(len(x_PE))

        def linear(x_P: jax.Array, layer: _ExpertLinear, scores_P1: jax.Array) -> jax.Array:
            y_P = grouped_matmul(x_P, layer.kernel[...], sizes_Y, expected)
            if layer.bias is None:
                return y_P
            experts_P = jnp.searchsorted(jnp.cumsum(sizes_Y), numbers_P, side="right")
            is_of_PY = jax.nn.one_hot(experts_P, num_own, dtype=x_P.dtype)
            return y_P + matmul(is_of_PY * scores_P1, layer.bias[...])

        one = jnp.ones((), x_TE.dtype)
        hidden_PF = self._hidden(lambda layer: linear(x_PE, layer, one)) * scores_P1
        y_DE = returned(linear(hidden_PF, self.down, scores_P1), tokens)
        if there is not None:
            y_DE = returned(self._exchange(y_DE.reshape(*there.pairs.shape, -1), 0, 0), there)
        elif self.axis is not None:
            y_DE = lax.psum_scatter(y_DE, self.axis, tiled=True)
        return y_DE, dropped

    def _tokens_of_all(
        self, x_TE: jax.Array, routing: Routing, there: Room | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gathers the tokens of all devices, or those that have a place ``there``, with their
        choices and scores. This device's experts are the first ones."""
        chosen_TK = routing.chosen
        parts = x_TE, chosen_TK, routing.scores
        if self.axis is None:
            return parts
        if there is None:
            x_DE, chosen_DK, scores_DK = (
                lax.all_gather(part, self.axis, tiled=True) for part in parts
            )
        else:
            # An empty place chose expert -1.
            numbers = _take(chosen_TK + 1, there.pairs // chosen_TK.shape[1]) - 1
            x_DE, chosen_DK, scores_DK = (
                self._exchange(part, 0, 0).reshape(-1, part.shape[-1])
                for part in (sent(x_TE, there), numbers, sent(routing.scores, there))
            )
        own_DK = chosen_DK - lax.axis_index(self.axis) * len(self.up.kernel[...])
        return x_DE, jnp.where(own_DK < 0, self.count, own_DK), scores_DK

    def _of_chosen_tokens(self, x_TE: jax.Array, routing: Routing, places: Room) -> jax.Array:
        """Computes the tokens that chose this device's experts, and sends the outputs back."""
        x_XCE, weights_XC = sent(x_TE, places), sent_scores(routing.scores, places)
        x_YDE, weights_YD = (self._exchange(parts, 0, 1) for parts in (x_XCE, weights_XC))

        weights_YD1 = weights_YD[..., None].astype(x_TE.dtype)

        def linear(x_YD: jax.Array, layer: _ExpertLinear, weights_YD1: jax.Array) -> jax.Array:
            y_YD = einsum("ydi,yio->ydo", x_YD, layer.kernel[...])
            if layer.bias is None:
                return y_YD
            return y_YD + weights_YD1 * layer.bias[...][:, None].astype(x_YD.dtype)

        one = jnp.ones((), x_TE.dtype)
        hidden_YDF = self._hidden(lambda layer: linear(x_YDE, layer, one)) * weights_YD1
        y_YDE = linear(hidden_YDF, self.down, weights_YD1)
        return returned(self._exchange(y_YDE, 1, 0), places)

    def _hidden(self, of_tokens: Callable[[_ExpertLinear], jax.Array]) -> jax.Array:
        """Computes the hidden values; ``of_tokens`` applies a linear map to the tokens."""
        up = of_tokens(self.up)
        if self.gate is None:
            return UNGATED[self.config.activation](up)
        return GATED[self.config.activation](of_tokens(self.gate), up)

    def _exchange(self, parts: jax.Array, split: int, joined: int) -> jax.Array:
        """Sends each device its part and joins those received: split and joined dimensions."""
        if self.axis is None:
            return parts
        return lax.all_to_all(parts, self.axis, split, joined, tiled=True)


class Mixture(nnx.Module):
    """Router, experts, and an MLP that sees every token if ``config.shared_width`` is given.

    Args:
      shared: the MLP that sees every token, or None.
      sharing: the devices that share the layer.
    """

    def __init__(
        self, config: GPTConfig, shared: nnx.Module | None, sharing: Sharing, *, rngs: nnx.Rngs
    ):
        self.router = Router(config, sharing, rngs=rngs)
        self.experts = Experts(config, sharing.expert_axis, rngs=rngs)
        self.shared = nnx.data(shared)
        self.shared_gate = (
            Linear(config.width, 1, bias=False, stddev=INIT_STDDEV, rngs=rngs)
            if config.shared_gate
            else nnx.data(None)
        )

    def __call__(self, x_BSE: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the output, and the layer's loss or None; dropped choices are its metric."""
        x_TE = x_BSE.reshape(-1, x_BSE.shape[-1])
        routing = self.router(x_TE)
        y_TE, dropped = self.experts(x_TE, routing)
        y_BSE = y_TE.reshape(x_BSE.shape)
        loss: Any = routing.loss
        if dropped is not None:
            loss = (jnp.float32(0) if loss is None else loss), {"dropped": dropped}
        if self.shared is not None:
            shared_BSE = self.shared(x_BSE)
            if self.shared_gate is not None:
                shared_BSE = jax.nn.sigmoid(self.shared_gate(x_BSE)) * shared_BSE
            y_BSE = y_BSE + shared_BSE
        return y_BSE, loss
