"""The device of a command."""

import torch


def choose_device(name: str) -> torch.device:
    """The device that ``--device`` names: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.

    Raises ValueError: another name, or there is no GPU that torch can use.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {name}: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device on this machine; give --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
