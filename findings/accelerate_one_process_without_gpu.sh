#!/usr/bin/env bash
# accelerate 1.15.0, torch 2.13.0
# Expected: accelerate launch --num_processes 2 starts two processes, or says that it cannot.
# Seen: on a machine without a GPU one process starts, with and without --cpu, and WORLD_SIZE is not
#   set. The warning lists defaults, and num_processes is not among them: it was passed.
# Output:
#   accelerate 1.15.0: --num_processes 2 started 1, with --cpu 1; torchrun --nproc_per_node 2 started 2
# For GRPO on GLM-Image: a trial of a multi-GPU recipe on a laptop tests one process only, and its
#   steps have half of the samples that the same command has on two GPUs. Use torchrun.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 accelerate==1.15.0
cd "$folder"
export HF_HOME="$folder" CUDA_VISIBLE_DEVICES="" PATH="$folder/venv/bin:$PATH"
unset WORLD_SIZE RANK LOCAL_RANK
cat >program.py <<'PY'
import os
print("rank", os.environ.get("RANK", "0"), "of", os.environ.get("WORLD_SIZE", "unset"))
PY
count() { "$@" 2>/dev/null | grep -c '^rank'; }
plain=$(count accelerate launch --num_processes 2 program.py)
cpu=$(count accelerate launch --cpu --num_processes 2 program.py)
torchrun=$(count torchrun --standalone --nproc_per_node 2 program.py)
version=$(python -c 'import accelerate; print(accelerate.__version__)')
echo "accelerate $version: --num_processes 2 started $plain, with --cpu $cpu;" \
  "torchrun --nproc_per_node 2 started $torchrun"
[ "$plain $cpu $torchrun" = "1 1 2" ]
