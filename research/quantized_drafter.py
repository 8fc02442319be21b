"""A copy of a drafter whose matrices are rounded to eight bits, to see what that costs in accepted drafts.

    python research/quantized_drafter.py packages/smollm2/vllm_crossspec_smollm2/eagle3 work/eagle3-fp8 --type fp8
    crossspec bench --model TARGET --spec eagle3.json --spec eagle3-fp8.json --batch-size 1

The copy has the drafter's own type, so that every machine runs it. Weights alone are rounded; with vLLM's
``"quantization": "fp8"``, which needs a GPU, the inputs of its products are, too. Norms, biases and embeddings stay as
they are.
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
FILE = "model.safetensors"


def rounded(weight: torch.Tensor, dtype: torch.dtype, by_row: bool) -> torch.Tensor:
    """A matrix [n, m] as it comes back from eight bits, with one scale, or one a row."""
    most = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    wide = weight.float()
    largest = wide.abs().amax(dim=1, keepdim=True) if by_row else wide.abs().amax()
    scale = (largest / most).clamp(min=1e-12)
    steps = wide / scale
    packed = (steps if dtype.is_floating_point else steps.round()).clamp(-most, most).to(dtype)
    return (packed.float() * scale).to(weight.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path, help="its folder, with one model.safetensors")
    parser.add_argument("out", type=Path, help="folder of the copy; it must not exist")
    parser.add_argument("--type", choices=TYPES, default="fp8", help="fp8 (e4m3) or int8 (default: fp8)")
    parser.add_argument("--by-row", action="store_true", help="a scale for each row of a matrix, not one for all")
    given = parser.parse_args()
    if not (given.drafter / FILE).exists():
        parser.error(f"{given.drafter} has no {FILE}")
    if given.out.exists():
        parser.error(f"{given.out} exists: name another folder")
    tensors, count = load_file(given.drafter / FILE), 0
    for name, weight in tensors.items():
        if weight.dim() == 2 and weight.is_floating_point() and "embed" not in name:
            tensors[name], count = rounded(weight, TYPES[given.type], given.by_row), count + 1
    shutil.copytree(given.drafter, given.out, ignore=shutil.ignore_patterns(FILE))
    save_file(tensors, given.out / FILE, metadata={"format": "pt"})
    print(f"{count} matrices of {len(tensors)} tensors rounded to {given.type}, in {given.out}")


if __name__ == "__main__":
    main()
