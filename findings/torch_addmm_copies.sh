#!/usr/bin/env bash
# torch 2.13.0, CPU
# Expected: torch.addmm(y, a, b) writes y + a @ b to new memory in one pass; addmm_ differs from it
#   only in where the result goes.
# Seen: addmm with a y of the result's shape first copies y whole (aten::copy_ in the profiler),
#   then adds the product to the copy. addmm_ makes no copy. The bits of the results are equal.
# Output:
#   torch 2.13.0+cpu
#   addmm: 1 aten::copy_
#   addmm_: 0 aten::copy_
#   same bits: True
# For GRPO on GLM-Image: a LoRA branch written as addmm(base, x A, B) pays for one copy more of
#   each layer's output. Where nothing else needs base, addmm_ gives the same bits without it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - 2> /dev/null <<'PY'
import torch
from torch.profiler import ProfilerActivity, profile

torch.manual_seed(0)
y, a, b = torch.randn(512, 512), torch.randn(512, 16), torch.randn(16, 512)
target, results = y.clone(), {}
print("torch", torch.__version__)
for name, call in {"addmm": lambda: torch.addmm(y, a, b),
                   "addmm_": lambda: target.addmm_(a, b)}.items():
    with profile(activities=[ProfilerActivity.CPU]) as record:
        result = call()
    copies = sum(x.count for x in record.key_averages() if x.key == "aten::copy_")
    results[name] = copies, result
    print(f"{name}: {copies} aten::copy_")
same = torch.equal(results["addmm"][1], results["addmm_"][1])
print("same bits:", same)
assert same and results["addmm"][0] == 1 and results["addmm_"][0] == 0
PY
