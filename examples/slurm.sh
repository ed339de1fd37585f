#!/usr/bin/env bash
# Slurm: 4 hosts with one torchrun each, which starts one process per GPU. Each of the 32 processes is a node that gossips;
# docs/nodes.md shows how to make a host one node.
#
#     sbatch examples/slurm.sh
#
#SBATCH --job-name=rumor
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:00:00
set -euo pipefail

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export OMP_NUM_THREADS=8

# --kill-on-bad-exit: if one host fails, the others would wait for it until the group's time-out
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${hosts[0]}:29500" \
    examples/from_ddp.py
