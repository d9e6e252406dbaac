#!/usr/bin/env bash
# Trains GLM-Image on the eight GPUs of one machine. Submit it in the root of the repository:
#   sbatch configs/slurm_one_machine.sh --config configs/real_ar_8gpu.yaml --output_dir runs/first \
#       --data.prompts_file my/prompts.txt --reward.functions my.py:meaning
# The words after the script are options of `python -m glm_grpo.train`.
#SBATCH --job-name=glm_grpo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1      # one launcher, which starts a process per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0                  # all memory of the machine
#SBATCH --time=24:00:00
#SBATCH --requeue                # after a failure of the machine
#SBATCH --signal=B:USR1@600      # ten minutes before the time limit, to this script
# The same command starts the run and goes on with it (--resume auto). Ten minutes before the time
# limit the processes finish their step and save, and the job goes back into the queue. If a step
# takes longer, the newest checkpoint counts (training.save_minutes).
set -euo pipefail

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
torchrun --standalone --nproc_per_node "${SLURM_GPUS_ON_NODE:-8}" \
    -m glm_grpo.train --resume auto "$@" &
launcher=$!
trap 'pkill -TERM -P "$launcher" || true; wait "$launcher" || true
    scontrol requeue "$SLURM_JOB_ID"' USR1
wait "$launcher"
