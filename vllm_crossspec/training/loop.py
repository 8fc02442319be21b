"""One training loop for every model of the project: seeded, resumable, with a progress bar and a loss curve.

If nothing is said, matrices are trained with Muon and everything else with AdamW (both from torch), under a schedule
that warms up, stays, and decays linearly over the last part of the run.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vllm_crossspec.files import replacing


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What a run of the loop is; two runs with equal configs and data give equal losses.

    Attributes:
        steps: optimizer steps in all.
        epochs: passes over the data that the caller turns into ``steps``; 0 leaves them.
        lr: peak learning rate, shared by Muon (RMS-matched) and AdamW.
        optimizer: ``muon`` for matrices and AdamW for the rest, or ``adamw`` for all.
        beta2: of AdamW, whose first beta is 0.9.
        warmup: steps of linear warm-up.
        schedule: ``linear`` falls to a twentieth over the last part of the run, ``cosine`` from the warm-up on to 0.
        cooldown: that last part, a share of the run.
        weight_decay: of both optimizers, on matrices only.
        clip: most that the gradient's norm may be; a larger one is scaled down to it.
        seed: of weights, data order and every other draw.
        save_every: steps between resumable checkpoints.
        eval_every: steps between evaluations.
    """

    steps: int
    epochs: int = 0
    lr: float = 2e-3
    optimizer: Literal["muon", "adamw"] = "muon"
    beta2: float = 0.95
    warmup: int = 50
    schedule: Literal["linear", "cosine"] = "linear"
    cooldown: float = 0.4
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 0
    save_every: int = 100
    eval_every: int = 200

    def rate(self, step: int) -> float:
        """The factor on ``lr`` at ``step`` (counted from 0)."""
        rise = min(1.0, (step + 1) / max(1, self.warmup))
        if self.schedule == "cosine":
            fallen = max(0, step - self.warmup) / max(1, self.steps - self.warmup)
            return rise * 0.5 * (1.0 + math.cos(math.pi * fallen))
        left = (self.steps - step) / max(1.0, self.cooldown * self.steps)
        return rise * max(0.05, min(1.0, left))


def make_optimizers(model: torch.nn.Module, config: LoopConfig) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices, AdamW for embeddings, output heads, norms and vectors; or AdamW for all.

    Parameters with an ``lr_scale`` are AdamW's, too, at so many times the rate.
    """
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    scaled: dict[float, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if (scale := getattr(parameter, "lr_scale", None)) is not None:
            scaled.setdefault(scale, []).append(parameter)
        else:
            is_matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if is_matrix else rest).append(parameter)
    optimizers: list[torch.optim.Optimizer] = []
    groups: list[dict[str, Any]] = [{"params": rest}] if rest else []
    groups += [{"params": parameters, "scale": scale} for scale, parameters in scaled.items()]
    if matrices and config.optimizer == "muon":
        optimizers.append(
            torch.optim.Muon(matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    elif matrices:
        groups.append({"params": matrices, "weight_decay": config.weight_decay})
    if groups:
        optimizers.append(torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, config.beta2), weight_decay=0.0))
    return optimizers


class Trainer:
    """Runs ``loss_fn`` over ``data`` for ``config.steps`` steps; resumes from ``out/state.pt`` when it is there.

    A run that still gained when it ended goes on with more ``config.steps``: its rate rises again, and decays over the
    last part of them all.

    Args:
        model: what is trained.
        data: endless iterator of batches; on resume it is advanced by the steps already done, so it must be a
            function of the seed alone.
        loss_fn: (model, batch, generator) -> (scalar loss, dict of figures to log). The generator is seeded with
            (seed, step): a resumed run draws what an unbroken one would have drawn.
        out: folder for ``state.pt``, ``log.jsonl`` and ``loss.png``.
        evaluate: optional, () -> dict of figures, every ``eval_every`` steps and at the end.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data: Iterator[Any],
        loss_fn: Callable[[torch.nn.Module, Any, torch.Generator], tuple[torch.Tensor, dict[str, float]]],
        out: Path,
        config: LoopConfig,
        evaluate: Callable[[], dict[str, float]] | None = None,
    ):
        self.model, self.data, self.loss_fn, self.out, self.config = model, data, loss_fn, out, config
        self.evaluate = evaluate
        self.optimizers = make_optimizers(model, config)
        self.step = 0
        self.log: list[dict[str, float]] = []
        out.mkdir(parents=True, exist_ok=True)
        self._resume()

    def run(self, title: str, stop_at: int | None = None) -> None:
        """Train to the end, or to step ``stop_at``; the state on disk is then resumable."""
        last = self.config.steps if stop_at is None else min(stop_at, self.config.steps)
        with progress_bar() as progress:
            task = progress.add_task(title, total=self.config.steps, completed=self.step)
            while self.step < last:
                figures = self._train_step()
                self.step += 1
                if self.evaluate and (self.step % self.config.eval_every == 0 or self.step == self.config.steps):
                    figures |= self.evaluate()
                self.log.append(figures)
                if self.step % self.config.save_every == 0 or self.step == last:
                    self.save()
                progress.update(task, completed=self.step, description=f"{title}  loss {figures['loss']:.3f}")

    def _train_step(self) -> dict[str, float]:
        start = time.perf_counter()
        factor = self.config.rate(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.config.lr * factor * group.get("scale", 1.0)
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
        self.model.train()
        loss, figures = self.loss_fn(self.model, next(self.data), generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return {"step": self.step + 1, "loss": loss.item(), **figures, "seconds": time.perf_counter() - start}

    def save(self) -> None:
        """Write the resumable state (atomically), the log and the picture of the loss."""
        state = {
            "step": self.step,
            "model": dict(self.model.state_dict()),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "log": self.log,
            "config": asdict(self.config),
        }
        with replacing(self.out / "state.pt") as partial:
            torch.save(state, partial)
        (self.out / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.log))
        draw_loss(self.log, self.out / "loss.png")

    def _resume(self) -> None:
        path = self.out / "state.pt"
        if not path.exists():
            return
        # Wherever the state was written, the optimizers and the model take it to their own device.
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["config"] | {"steps": self.config.steps} != asdict(self.config):
            raise ValueError(f"{path} is of a run with other settings; give another --out or delete that file")
        if self.config.steps < state["step"]:
            done = f"{path} has {state['step']} behind it"
            raise ValueError(f"--steps {self.config.steps}: {done}; give more, or another --out")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.log = state["step"], state["log"]
        for _ in range(self.step):
            next(self.data)


def progress_bar() -> Progress:
    """A bar with what is done, of how many, and times."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), refresh_per_second=0.5)


@contextlib.contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[Any]:
    """The axes of a figure of matplotlib; written to ``path``, a .png or .svg file, when all is drawn.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError('pictures need matplotlib: run `pip install "vllm-crossspec[train]"`') from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, layout="constrained", **options)
    yield axes
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_loss(log: list[dict[str, float]], path: Path) -> None:
    """Draw the training loss (smoothed) and every evaluated figure over the steps."""
    with picture(path, figsize=(8, 4.5)) as axes:
        steps = [line["step"] for line in log]
        smooth, value = [], log[0]["loss"]
        for line in log:
            value = 0.95 * value + 0.05 * line["loss"]
            smooth.append(value)
        axes.plot(steps, smooth, label="train (smoothed)", linewidth=1.2)
        for key in sorted({k for line in log for k in line if k.startswith("dev")}):
            points = [(line["step"], line[key]) for line in log if key in line]
            axes.plot(*zip(*points, strict=True), marker=".", label=key)
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats a token)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
