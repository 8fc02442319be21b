"""One training loop for every model of the project: seeded, resumable, with a progress bar and a loss curve.

If nothing is said, matrices are trained with Muon and everything else with AdamW (both from torch), under a schedule
that warms up, stays, and decays linearly over the last part of the run.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from crossspec_tools.train.muon import Float32Muon
from crossspec_tools.train.progress import StepProgress, slow_hint
from crossspec_tools.train.recipes import LoopConfig
from crossspec_tools.train.stopping import Stopped, StopSignals
from vllm_crossspec.devices import has_avx512
from vllm_crossspec.differences import differences
from vllm_crossspec.files import replacing


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
        muon = Float32Muon if matrices[0].device.type == "cpu" and not has_avx512() else torch.optim.Muon
        optimizers.append(muon(matrices, config.lr, config.weight_decay, adjust_lr_fn="match_rms_adamw"))
    elif matrices:
        groups.append({"params": matrices, "weight_decay": config.weight_decay})
    if groups:
        optimizers.append(torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, config.beta2), weight_decay=0.0))
    return optimizers


class Trainer:
    """Runs ``loss_fn`` over ``data`` for ``config.steps`` steps; resumes from ``out/state.pt`` when it is there.

    A finished run resumes with more ``config.steps``: its rate rises again, and decays over the last part of them all.

    Args:
        data: endless batches, by the seed alone: on resume those of the steps already done are skipped.
        loss_fn: (model, batch, generator) -> (scalar loss, figures to log; ``tokens``, those of the batch, are shown as
            tokens a second). The generator is seeded with (seed, step), so that a resumed run draws the same.
        evaluate: () -> figures, every ``eval_every`` steps and at the end.
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

    def run(self, title: str, stop_at: int | None = None, sizes: Mapping[str, int] | None = None) -> None:
        """Train to the end, or to step ``stop_at``; the state on disk is then resumable.

        Raises Stopped: SIGTERM or SIGINT came; the step under way is saved. ``sizes``: as of :func:`slow_hint`.
        """
        last = self.config.steps if stop_at is None else min(stop_at, self.config.steps)
        hint, is_new = "", False
        with StopSignals() as signals, StepProgress(title, self.step, self.config.steps) as progress:
            if self.step:
                is_whole = self.step == self.config.steps
                how = "has made its steps: give more --steps to train on;" if is_whole else "resumed"
                progress.say(f"{title}: {how} at step {self.step} of {self.config.steps}")
            while True:
                is_new |= self._evaluate_if_due(signals)
                is_over = self.step >= last or signals.caught is not None
                if is_new and (is_over or self.step % self.config.save_every == 0):
                    self.save()
                    is_new = False
                if is_over:
                    break
                figures = self._train_step()
                self.step += 1
                self.log.append(figures)
                is_new = True
                progress.show(self.step, figures)
                if not hint and (hint := slow_hint(figures["seconds"], self.model, sizes or {})):
                    progress.say(hint)
        if signals.caught is not None:
            raise Stopped(signals.caught, f"after step {self.step} of {self.config.steps}")

    def _evaluate_if_due(self, signals: StopSignals) -> bool:
        """Evaluate where it is due and the log has it not; whether the log has changed. A signal ends it half-way."""
        is_due = self.step > 0 and (self.step % self.config.eval_every == 0 or self.step == self.config.steps)
        if self.evaluate is None or not is_due or any(key.startswith("dev") for key in self.log[-1]):
            return False
        figures: dict[str, float] = {}
        with signals.interrupting():
            figures = self.evaluate()
        self.log[-1] |= figures
        return bool(figures)

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
        if other := differences(state["config"] | {"steps": self.config.steps}, asdict(self.config)):
            raise ValueError(
                f"{path} is of a run with other {', '.join(other)}; give another --out or delete that file"
            )
        if (steps := self.config.steps) < state["step"]:
            raise ValueError(f"--steps {steps}: {path} has {state['step']} behind it; give more, or another --out")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.log = state["step"], state["log"]
        for _ in range(self.step):
            next(self.data)


@contextlib.contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[Any]:
    """The axes of a figure of matplotlib, with grids and legends; written to ``path`` (.png or .svg) when all is drawn.

    Raises ValueError: it is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError('pictures need matplotlib: run `pip install "vllm-crossspec[train]"`') from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, layout="constrained", **options)
    yield axes
    for one in figure.axes:
        one.grid(alpha=0.3)
        if one.get_legend_handles_labels()[0] and not figure.legends:
            one.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_loss(log: list[dict[str, float]], path: Path) -> None:
    """Draw the training loss (smoothed) and every evaluated figure over the steps."""
    with picture(path, figsize=(8, 4.5)) as axes:
        steps = [line["step"] for line in log]
        smooth = accumulate((line["loss"] for line in log), lambda mean, loss: 0.95 * mean + 0.05 * loss)
        axes.plot(steps, list(smooth), label="train (smoothed)", linewidth=1.2)
        for key in sorted({k for line in log for k in line if k.startswith("dev")}):
            points = [(line["step"], line[key]) for line in log if key in line]
            axes.plot(*zip(*points, strict=True), marker=".", label=key)
        axes.set(xlabel="step", ylabel="loss (nats a token)")
