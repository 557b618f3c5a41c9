#!/bin/bash
# A job with its store as a step of its own on the first node:  sbatch slurm.sh python train.py
#SBATCH --job-name=resilient
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --signal=B:TERM@60
set -euo pipefail

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RESILIENT_STORE="$head_node:${STORE_PORT:-29400}"
export RESILIENT_JOB="slurm-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
export RESILIENT_SEAT_WAIT="${RESILIENT_SEAT_WAIT:-0}"  # Slurm starts no lost task again; 10min if something of yours does.
data="${STORE_DATA:-${SLURM_SUBMIT_DIR:-$PWD}/store-$SLURM_JOB_ID}"

# Overlaps with the ranks: the store needs no core of its own. It is started again when it dies; 0 is an end on purpose, 2 and 4 do
# not get better by themselves.
srun --nodes=1 --ntasks=1 --nodelist="$head_node" --overlap --job-name=store bash -c '
  trap "kill \$store 2>/dev/null; wait \$store; exit 0" TERM
  while :; do
    resilient-store serve --listen "$RESILIENT_STORE" --data "$0" &
    store=$!
    wait "$store" && exit 0
    status=$?
    case $status in 2|4) exit $status ;; esac
  done' "$data" &
store_step=$!
trap 'kill "$store_step" 2>/dev/null || true; wait "$store_step" || true' EXIT

# The ranks outlive each other: what a loss means is for the runtime to say, not for srun.
srun --overlap --kill-on-bad-exit=0 bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; exec "$@"' rank "$@"
