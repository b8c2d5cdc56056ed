"""Trains a decoder by MaxText's own loop and by jaxpipe's schedules, and compares their metrics.

`python examples/maxtext/compare.py CHECKOUT` applies `pipeline_schedule.patch` to a checkout of
github.com/AI-Hypercomputer/maxtext (the patch is made for commit e591f30c), and runs its `train.py`
with and without a schedule on eight simulated devices. The text and the tokenizer are those of
MaxText's tests. Both MaxText's requirements and jaxpipe are installed in the Python that runs this.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 20
PATCH = Path(__file__).with_name("pipeline_schedule.patch").resolve()
RUNS = [
    ("own loop",),
    ("1f1b",),
    ("interleaved",),
    ("zb-v",),
    # With a checkpoint after half of the steps.
    ("own loop", "zb-v"),
    ("zb-v", "own loop"),
]
OPTIONS = f"""
    hardware=cpu skip_jax_distributed_system=true dtype=float32 matmul_precision=highest
    decoder_block=llama2 base_num_decoder_layers=8 base_emb_dim=32 base_mlp_dim=64 head_dim=8
    base_num_query_heads=4 base_num_kv_heads=2 attention=dot_product vocab_size=32000
    max_target_length=32 per_device_batch_size=2 async_checkpointing=false
    learning_rate=3e-3 learning_rate_schedule_steps={STEPS}
    dataset_type=grain grain_worker_count=0
    grain_train_files=tests/assets/local_datasets/c4_en_dataset_minimal/c4/en/3.0.1/c4-train.array*
    tokenizer_path=src/maxtext/assets/tokenizers/tokenizer.llama2
    enable_goodput_recording=false monitor_goodput=false
""".split()


def patch(checkout):
    """Applies the patch, unless it is applied already."""
    is_applied = ["git", "apply", "--reverse", "--check", str(PATCH)]
    if subprocess.run(is_applied, cwd=checkout, capture_output=True).returncode:
        subprocess.run(["git", "apply", str(PATCH)], cwd=checkout, check=True)


def train(checkout, schedule, options):
    """Runs MaxText's trainer: by its own loop over eight shards, or a schedule on 4 x 2 devices."""
    if schedule != "own loop":
        options = [*options, f"pipeline_schedule={schedule}", "ici_pipeline_parallelism=4"]
    variables = {
        "DECOUPLE_GCLOUD": "TRUE",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{checkout}/src",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    program = [sys.executable, "-m", "maxtext.trainers.pre_train.train"]
    done = subprocess.run(
        [*program, "src/maxtext/configs/base.yml", *OPTIONS, *options],
        cwd=checkout,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"MaxText fails with {options}:\n{done.stderr[-4000:]}")


def metrics_of(checkout, schedules):
    """Trains by one schedule after the other, each from the checkpoint of the one before it.

    Returns:
      What MaxText logs of every step.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        options = ["run_name=run", f"base_output_directory={folder}", f"metrics_file={metrics}"]
        for number, schedule in enumerate(schedules, start=1):
            steps = STEPS * number // len(schedules)
            train(checkout, schedule, [*options, f"steps={steps}"])
        lines = metrics.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def difference(steps, reference, name):
    """The largest relative difference of a metric at a step."""
    pairs = zip(steps, reference, strict=True)
    return max(abs(step[name] / wanted[name] - 1) for step, wanted in pairs)


def main(checkout):
    patch(checkout)
    print("| trained by | first loss | last loss | losses differ by | gradient norms by |")
    print("|---|---|---|---|---|")
    reference = None
    for schedules in RUNS:
        steps = metrics_of(checkout, schedules)
        reference = reference or steps
        first, last = (steps[n]["learning/loss"] for n in (0, -1))
        of_loss = difference(steps, reference, "learning/loss")
        of_norm = difference(steps, reference, "learning/raw_grad_norm")
        name = ", then ".join(schedules)
        print(f"| {name} | {first:.6f} | {last:.6f} | {of_loss:.1e} | {of_norm:.1e} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
