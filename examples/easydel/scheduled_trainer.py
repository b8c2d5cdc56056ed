"""EasyDeL's trainer with the loss and the gradients of a pipeline, scheduled by jaxpipe."""

from unittest import mock

import easydel
import jax
import jax.numpy as jnp
import numpy as np
from easydel.infra import loss_utils
from easydel.trainers import training_utils
from easydel.trainers.trainer import trainer
from eformer.escale.partition import constraints
from ejkernel.types import MaskInfo
from flax import nnx

import jaxpipe
import jaxpipe.nnx

# In the pipeline a device has its own part of every array already.
_unconstrained = mock.patch.object(
    constraints, "_with_sharding_constraint", lambda array, sharding: array
)


class ScheduledTrainer(easydel.Trainer):
    """A trainer of a Llama whose mesh has the stages on its axis "dp".

    Args:
      schedule: name of a schedule, such as "zb-v"; `jaxpipe schedules` lists them.
      options: those of EasyDeL's trainer.
    """

    def __init__(self, *, schedule, **options):
        self._schedule = schedule
        super().__init__(**options)

    def configure_functions(self):
        with mock.patch.object(trainer, "training_step", self._step):
            return super().configure_functions()

    def _step(self, state, batch, loss_config, learning_rate_fn, spec, accumulated, emulator):
        """Does what EasyDeL's `training_step` does."""
        del spec  # The pipeline shards the batch over "fsdp".
        model = state.merge(state.graphstate)
        if not isinstance(model, easydel.LlamaForCausalLM) or accumulated != 1 or emulator:
            raise ValueError(
                "A schedule needs a LlamaForCausalLM, gradient_accumulation_steps=1 (microbatches "
                "take its place) and no quantization."
            )
        metrics, gradients = value_and_grad(model, batch, loss_config, schedule=self._schedule)
        metrics = training_utils.update_metrics(
            metrics=metrics, learning_rate_fn=learning_rate_fn, step=state.step, gradients=gradients
        )
        state = training_utils.update_state_respectfully(
            state=state, gradients=gradients, loss_config=loss_config, metrics=metrics
        )
        return state, metrics


def value_and_grad(model, batch, loss_config, *, schedule):
    """Computes a batch's metrics and its gradients, an `nnx.State`."""

    def embed(model, batch):
        return model.base_model.embed_tokens(batch["input_ids"])

    def run_layer(layer, x, batch):
        mask = MaskInfo.dynamic_init(
            mask_info=None,
            input_ids=batch["input_ids"],
            inputs_embeds=x,
            attention_mask=batch["attention_mask"],
        )
        return layer(
            hidden_states=x,
            mask_info=mask,
            position_ids=mask.q_position_ids,
            mode="train",
            frequencies=jnp.asarray(frequencies),
        ).hidden_states

    def loss(model, x, batch):
        masked = {"attention_mask": batch["attention_mask"], "inputs_embeds": x}
        labels = batch.get("labels", batch["input_ids"])
        _, metrics = model.compute_loss(labels=labels, loss_config=loss_config, **masked)
        weight = metrics.weight_sum
        means = {name: getattr(metrics, name) for name in ("accuracy", "z_loss")}
        means = {n: jaxpipe.Weighted(value * weight, weight) for n, value in means.items()}
        return jaxpipe.Weighted(metrics.loss * weight, weight), means | {
            "weight_sum": jaxpipe.Sum(weight)
        }

    outside, layers = _shapes(model)
    with jax.ensure_compile_time_eval():
        frequencies = np.asarray(model.config.get_basic_frequencies().value)
    converted = jaxpipe.nnx.model(outside, layers=layers, embed=embed, layer=run_layer, loss=loss)
    pipe = jaxpipe.Pipeline(
        converted.model,
        converted.params,
        schedule=schedule,
        mesh=model.mesh,
        stage_axis="dp",
        data_axes=("fsdp",),
        zero=3,
    )
    state = nnx.state(model, nnx.Param)
    params = nnx.to_pure_dict(state)
    layers = params["model"].pop("layers")
    stacked = jax.tree.map(lambda *weights: jnp.stack(weights), *layers.values())
    placed = pipe.place({"layers": stacked, "embed": params, "head": {}})
    with _unconstrained:
        (value, means), gradients = pipe.value_and_grad(placed, batch)
    gradients = pipe.unplace(gradients)
    gradients["embed"]["model"]["layers"] = {
        n: jax.tree.map(lambda w, n=n: w[n], gradients["layers"]) for n in layers
    }
    nnx.replace_by_pure_dict(state, gradients["embed"])
    return loss_utils.LossMetrics(loss=value, **means), state


def _shapes(model):
    """Makes the model without its layers, and a list of these, all without arrays."""
    graph, state = nnx.split(model)
    model = nnx.merge(graph, jax.eval_shape(lambda: state))
    layers, model.base_model.layers = model.base_model.layers, nnx.List([])
    first = nnx.split(layers[0])  # Layers differ in nothing but their index.
    return model, [nnx.merge(*first, copy=True) for _ in layers]
