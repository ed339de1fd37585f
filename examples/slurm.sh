#!/usr/bin/env bash
# Slurm: 4 hosts with one node each. The loss of a host does not stop the others, unless it is the first one, where this script runs.
#
#     sbatch examples/slurm.sh
#
#SBATCH --job-name=rumor
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --no-kill
set -euo pipefail

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export OMP_NUM_THREADS=8 COORDINATOR="${hosts[0]}:29510"

rumor coordinator --bind 0.0.0.0:29510 &
trap "kill $!" EXIT

# a node that fails is started again, and takes over the others' model
node='for start in 1 2 3; do
    python examples/elastic.py --coordinator "$COORDINATOR" \
        --name "host$SLURM_PROCID" && break
done'

# --no-kill, --kill-on-bad-exit=0, --wait=0: if one host fails, the others go on
srun --no-kill --kill-on-bad-exit=0 --wait=0 bash -c "$node"
