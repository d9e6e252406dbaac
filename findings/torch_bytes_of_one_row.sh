#!/usr/bin/env bash
# torch 2.13.0
# Expected: a tensor that `contiguous()` returns can be viewed as bytes, whatever its size.
# Seen: with one column it cannot. `x.T.contiguous()` of a tensor [1, T] is x.T itself, whose stride
#   along its last dimension is T: of a dimension of size 1 the stride does not count for
#   `is_contiguous()`, but it does for `view(dtype)`, which raises. With two columns it works.
#   `clone(memory_format=torch.contiguous_format)` gives the stride 1.
# Output:
#   torch 2.13.0: 2 samples (2, 1) viewed; 1 sample (1, 5) raised, and its clone (1, 1) viewed
# For GRPO on GLM-Image: code that packs what a sampling step reads or writes into rows of bytes
#   passes all tests with groups of images and fails for a user who samples a single one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch


def tried(x):
    "What a view as bytes does."
    assert x.is_contiguous()
    try:
        return f"{tuple(x.stride())} {'viewed' if x.view(torch.uint8).shape[-1] else ''}"
    except RuntimeError as error:
        assert "stride(-1) must be 1" in str(error)
        return f"{tuple(x.stride())} raised"


two, one = (torch.zeros(samples, 5, dtype=torch.float64).T for samples in (2, 1))
cloned = tried(one.clone(memory_format=torch.contiguous_format))
two, one = tried(two.contiguous()), tried(one.contiguous())
version = torch.__version__.split("+")[0]
print(f"torch {version}: 2 samples {two}; 1 sample {one}, and its clone {cloned}")
assert (two, one, cloned) == ("(2, 1) viewed", "(1, 5) raised", "(1, 1) viewed")
PY
