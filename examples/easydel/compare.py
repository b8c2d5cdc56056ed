"""Trains a Llama by EasyDeL's own loop and by jaxpipe's schedules, and compares their metrics.

`python examples/easydel/compare.py` runs EasyDeL's trainer on eight simulated devices, on the bytes
of this repository's LICENSE, and ends with status 1 if they differ by more than 1e-6. EasyDeL 0.3.0
and jaxpipe are installed in the Python that runs this: `make test-easydel`.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["EASYDEL_AUTO"] = "0"  # It sets flags that not every version of XLA knows.

import datasets
import easydel
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scheduled_trainer import ScheduledTrainer

STEPS, ROWS, LENGTH = 20, 16, 32
SCHEDULES = "1f1b", "interleaved", "zb-v"
LICENSE = Path(__file__).parents[2] / "LICENSE"


def make_model():
    config = easydel.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attn_mechanism="vanilla",
        attn_dtype=jnp.float32,
        gradient_checkpointing="",
        sharding_axis_dims=(4, 2, 1, 1, 1),  # dp, fsdp, ep, tp, sp
    )
    types = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    precision = jax.lax.Precision.HIGHEST
    return easydel.LlamaForCausalLM(config=config, **types, precision=precision, rngs=nnx.Rngs(0))


def train(trainer, folder, **options):
    """Returns the loss and the largest norm of a parameter's gradient of every step."""
    arguments = easydel.TrainingArguments(
        save_directory=folder,
        total_batch_size=ROWS,
        max_training_steps=STEPS,
        max_length=LENGTH,
        learning_rate=3e-3,
        do_last_save=False,
        use_wandb=False,
    )
    text = np.frombuffer(LICENSE.read_bytes(), np.uint8).astype(np.int32)
    rows = text[: STEPS * ROWS * LENGTH].reshape(-1, LENGTH)
    columns = {"input_ids": rows, "attention_mask": np.ones_like(rows)}
    data = datasets.Dataset.from_dict(columns).with_format("numpy")
    steps = []

    class Recording(trainer):
        def on_step_end(self, state, metrics, step):
            steps.append((float(metrics.loss), float(metrics.max_grad_norm)))
            return super().on_step_end(state, metrics, step)

    Recording(arguments=arguments, model=make_model(), dataset_train=data, **options).train()
    assert len(steps) == STEPS
    return np.array(steps)


def main():
    with tempfile.TemporaryDirectory() as folder:
        runs = {"own loop": train(easydel.Trainer, folder)}
        for name in SCHEDULES:
            runs[name] = train(ScheduledTrainer, folder, schedule=name)
    print("| trained by | first loss | last loss | losses differ by | gradient norms by |")
    print("|---|---|---|---|---|")
    for name, steps in runs.items():
        of_loss, of_norm = np.abs(steps / runs["own loop"] - 1).max(axis=0)
        first, last = steps[[0, -1], 0]
        print(f"| {name} | {first:.6f} | {last:.6f} | {of_loss:.1e} | {of_norm:.1e} |")
        if max(of_loss, of_norm) > 1e-6:
            sys.exit(f"{name} differs from EasyDeL's own loop.")


if __name__ == "__main__":
    main()
