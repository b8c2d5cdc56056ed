#!/bin/bash
# Trains on GPUs under Slurm: one process per GPU, on any number of nodes.
#
#   sbatch configs/slurm.sh                                   # the configuration below
#   sbatch --nodes=4 configs/slurm.sh --config my.yaml        # another one, on 4 nodes
#   sbatch configs/slurm.sh --config my.yaml --resume         # continue after a time limit
#
# mesh.stage x mesh.data must be the number of GPUs: nodes x 8 here. Data shards lie within a node if it
# has room for them, and stages then cross the network; --dry-run says which axes do.

#SBATCH --job-name=jaxpipe
#SBATCH --nodes=1
# One process per GPU: under Slurm, jax gives each process the GPU with its local number.
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
# After a node has failed, Slurm starts the job again.
#SBATCH --requeue
# Every process gets SIGTERM before the time limit: the run saves and ends with status 0.
#SBATCH --signal=TERM@300

set -euo pipefail

# The folder that sbatch was called from: the repository, with .venv/ from `make setup` and the GPU
# extra (.venv/bin/python -m pip install '.[gpu]'), and the prepared data, on a shared disk.
cd "${SLURM_SUBMIT_DIR}"

if [[ $# -eq 0 ]]; then
    set -- --config configs/gpt-tiny.yaml
fi

# A job that Slurm has restarted continues its run.
restarts="${SLURM_RESTART_COUNT:-0}"
if (( restarts > 0 )); then
    set -- "$@" --resume
fi

# srun starts the processes; train.py finds the coordinator and its own number in the environment.
# --gpu-bind=none lets all processes of a node see all its GPUs, as jax expects.
# --kill-on-bad-exit ends all processes when one fails; otherwise they would wait for it.
status=0
srun --kill-on-bad-exit=1 --gpu-bind=none .venv/bin/python train/train.py "$@" || status=$?

# Statuses 1 and 2 would recur (docs/when-something-goes-wrong.md). srun returns the largest status of all
# processes: 75, or that of one that was killed.
if (( status > 2 && restarts < 10 )); then
    scontrol requeue "${SLURM_JOB_ID}"
fi
exit "${status}"
