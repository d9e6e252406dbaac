#!/usr/bin/env bash
# safetensors 0.8.0
# Expected: save_file() makes a file as open(name, "wb") does: with umask 022 everybody may read it.
#   A file that is written again keeps its mode.
# Seen: the file has mode 0600 whatever the umask says, and one that had 0644 has 0600 afterwards.
#   save_pretrained() of transformers, diffusers and peft writes weights through this function.
# Output:
#   safetensors 0.8.0
#   open: 0o644, save_file: 0o600, save_file over a file with 0o644: 0o600
# For GRPO on GLM-Image: a server that runs as another user, or in another container, cannot open
#   an adapter or a merged model that root has trained. Set the mode after saving (chmod 644).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q safetensors==0.8.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
import os
import numpy as np
import safetensors
from safetensors.numpy import save_file


def mode(name):
    return oct(os.stat(name).st_mode & 0o777)


os.umask(0o022)
weights = {"x": np.zeros(2)}
with open("plain", "wb") as file:
    file.write(b"x")
save_file(weights, "new")
save_file(weights, "again")
os.chmod("again", 0o644)
save_file(weights, "again")
print("safetensors", safetensors.__version__)
print(f"open: {mode('plain')}, save_file: {mode('new')}, ", end="")
print(f"save_file over a file with 0o644: {mode('again')}")
assert [mode(name) for name in ("plain", "new", "again")] == ["0o644", "0o600", "0o600"]
PY
