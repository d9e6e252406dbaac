#!/usr/bin/env bash
# Trains GLM-Image on several machines of eight GPUs. Submit it in the root of the repository:
#   sbatch --nodes 4 configs/slurm_several_machines.sh --config configs/real_ar_8gpu.yaml \
#       --output_dir runs/first --data.prompts_file my/prompts.txt --reward.functions my.py:meaning
# All machines need the same folders: any of them may get rank 0, which writes the run, and each
# rank reads the checkpoint that the run goes on from. training.batch_size is a multiple of the
# number of GPUs. The first rank of each machine downloads the model; where machines have no
# network, set HF_HOME to a folder that already holds it, or model.name to a folder.
#SBATCH --job-name=glm_grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1      # one launcher per machine, which starts a process per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0                  # all memory of the machines
#SBATCH --time=24:00:00
#SBATCH --requeue                # after a failure of a machine
#SBATCH --signal=B:USR1@600      # ten minutes before the time limit, to this script
# The same command starts the run and goes on with it (--resume auto). Ten minutes before the time
# limit the job goes back into the queue; the newest checkpoint counts (training.save_minutes).
set -euo pipefail

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_host=${hosts%%$'\n'*}                 # the launchers meet here
port=$((20000 + SLURM_JOB_ID % 10000))      # two jobs on a machine need two ports
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun does not inherit it (SLURM 22.05 and later)
srun --kill-on-bad-exit=1 \
    torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv_backend c10d --rdzv_endpoint "$first_host:$port" --rdzv_id "$SLURM_JOB_ID" \
    -m glm_grpo.train --resume auto "$@" &
launcher=$!
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
wait "$launcher"
