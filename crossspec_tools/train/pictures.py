"""Pictures of records: thresholds against what they are worth, and one text drafter by drafter."""

from pathlib import Path

import torch

from crossspec_tools.records.rounds import Rounds
from crossspec_tools.train.calibration import OVERALL, Calibration
from crossspec_tools.train.loop import picture
from vllm_crossspec.heterospec.calibration import Calibration as BinCalibration

COLOURS = ("tab:orange", "tab:blue", "tab:green", "tab:red", "tab:purple", "tab:brown")


def draw_calibration(found: Calibration, drafters: tuple[str, ...], policy: str, value_name: str, path: Path) -> None:
    """Worth along each threshold, by category; the overall best is marked."""
    unit = "nats" if policy == "entropy" else "tokens"
    with picture(path, 1, len(found.grid), figsize=(7 * len(found.grid), 4.5)) as panels:
        for i, axes in enumerate([panels] if len(found.grid) == 1 else panels):
            for name, curves in found.curves.items():
                strong = {"linewidth": 2.2, "color": "black"} if name == OVERALL else {"linewidth": 1.2}
                axes.plot(found.grid[i], curves[i], label=name, **strong)
            axes.axvline(found.overall.thresholds[i], color="grey", linestyle="--", linewidth=1)
            name = f"{policy} threshold of {drafters[i]} against {drafters[-1]} ({unit})"
            axes.set(xlabel=name, ylabel=value_name)


def draw_bins(rounds: Rounds, bins: BinCalibration, path: Path) -> None:
    """Phi against the terminal confidence rank of fully accepted paths (HeteroSpec's figure 4), and accepted tokens."""
    full = rounds.accepted >= bins.tree.depth
    with picture(path, 2, 1, figsize=(8, 6), sharex=True) as (above, below):
        above.scatter(rounds.phi[full], rounds.rank[full], s=5, alpha=0.4, color="tab:blue")
        above.set_ylabel("terminal confidence rank\n(fully accepted paths)")
        edges = [0.0, *bins.thresholds, float(rounds.phi.nan_to_num(0.0).max())]
        below.stairs([one.mean_accepted for one in bins.bins], edges, fill=True, alpha=0.4, color="tab:orange")
        below.set(xlabel="Phi (nats)", ylabel="accepted draft tokens\n(mean of all rounds)")
        for axes in (above, below):
            for threshold in bins.thresholds:
                axes.axvline(threshold, color="grey", linestyle="--", linewidth=1)


def draw_trace(
    lengths: torch.Tensor, rounds: list[tuple[int, int]], drafters: tuple[str, ...], title: str, path: Path
) -> None:
    """The drafters' acceptance lengths at the places of a text, int [P, N], and (place, drafter) of the ``rounds``.

    As WhiFlash's figure 2.
    """
    with picture(path, figsize=(max(7.0, 0.12 * len(lengths)), 4)) as axes:
        for index, name in enumerate(drafters):
            colour, own = COLOURS[index % len(COLOURS)], lengths[:, index]
            axes.step(range(len(own)), own, where="mid", color=colour, linewidth=1.0, alpha=0.7, label=name)
            chosen = [place for place, drafter in rounds if drafter == index]
            axes.scatter(chosen, own[chosen], color=colour, s=22, zorder=3, label=f"{name}, chosen")
        axes.set(xlabel="token of the answer", ylabel="acceptance length (tokens)")
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=9)
        axes.figure.legend(fontsize=8, ncols=2 * len(drafters), loc="outside lower center")


def draw_reliability(
    gains: torch.Tensor, seen: torch.Tensor, kinds: dict[str, torch.Tensor], drafters: tuple[str, ...], path: Path
) -> None:
    """Predicted gains [M, N - 1] beside those ``seen``: means of ten equally large groups, by kind of text.

    ``kinds``: bool [M] records of each kind. ``drafters``: [N] names, the reference last.
    """
    others = gains.shape[1]
    with picture(path, 1, others, figsize=(5.5 * others, 4.5)) as panels:
        for i, axes in enumerate([panels] if others == 1 else panels):
            for kind, rows in kinds.items():
                order = gains[rows, i].argsort()
                groups = [group for group in order.tensor_split(10) if len(group)]
                said = [float(gains[rows, i][group].mean()) for group in groups]
                axes.plot(said, [float(seen[rows, i][group].mean()) for group in groups], marker="o", label=kind)
            ends = [float(gains[:, i].min()), float(gains[:, i].max())]
            axes.plot(ends, ends, color="grey", linestyle="--", linewidth=1, label="as predicted")
            name = f"predicted gain of {drafters[i]} over {drafters[-1]} (tokens)"
            axes.set(xlabel=name, ylabel="seen gain (tokens)")
