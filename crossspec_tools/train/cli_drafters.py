"""The commands of `crossspec train` that make drafters."""

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Option

from crossspec_tools.train import cli_options as shared
from crossspec_tools.train import recipes
from crossspec_tools.train.stopping import stoppable
from vllm_crossspec.cli.options import grouped
from vllm_crossspec.kinds.settings import MAX_DEPTH
from vllm_crossspec.names import look_up


def chain_of(num_drafts: int) -> dict[str, Any]:
    """What a server's config says of chains of so many drafts; no drafter's are longer than ``MAX_DEPTH``."""
    return {"num_speculative_tokens": min(num_drafts, MAX_DEPTH), "tree": {"type": "chain"}}


class Trainer(NamedTuple):
    """How drafters of one kind are trained, which ``crossspec_tools.train.<kind>`` does with its ``train_<kind>``."""

    config: Any  # of which the options are made; its docstring is the command's help
    steps: int  # defaults of the options that all have
    lr: float  # defaults of the options that all have
    # the config's fields, of those that were given. Raises ValueError where they do not go together.
    settings: Callable[[dict[str, Any]], dict[str, Any]] = dict
    made: str = "drafter"  # what it makes, in a word
    # of the config, what a server's config says beside method and model; None: no engine drafts with it
    served: Callable[[Any], dict[str, Any] | None] = lambda config: chain_of(config.num_steps)
    papers: Mapping[str, Any] | None = None  # fields that `--recipe paper` stands for; None: there is no such option
    # settings of the loop that it stands for
    paper_loop: dict[str, Any] = {}  # noqa: RUF012 (read alone)

    def config_of(self, options: Any) -> Any:
        """What the options stand for."""
        given = _given(options)
        if self.papers is not None:
            known: dict[str, Mapping[str, Any]] = {"pocket": {}, "paper": self.papers}
            given = {**look_up(given.pop("recipe_name"), known, "--recipe", "recipe"), **given}
        return self.config(**self.settings(given))

    def command(self, method: str) -> Callable[..., None]:
        """The command, as typer takes it, of the drafters that configs call ``method``."""

        def command(
            *,
            lessons: shared.Lessons,
            out: shared.Out,
            steps: Annotated[int | None, Option(min=1, show_default=f"{self.steps}", help=shared.STEPS)] = None,
            lr: Annotated[float | None, Option(min=0.0, show_default=f"{self.lr:g}", help=shared.RATE)] = None,
            loop: recipes.options_of(recipes.LoopConfig),  # type: ignore[valid-type]
            recipe: Any,
            machine: shared.Machine,
        ) -> None:
            config = self.config_of(recipe)
            run = self._run(steps, lr, loop, getattr(recipe, "recipe_name", "") == "paper")
            shared.check_folder("--data", lessons.data, "make it with `crossspec train generate`")
            shared.check_folder("--target", lessons.target, "give the Hugging Face folder of the target")
            shared.check_target(lessons.target)
            shared.begin(out, machine.threads, machine.resume)
            with stoppable(out / "state.pt", machine.resume):
                train = getattr(import_module(f"crossspec_tools.train.{method}"), f"train_{method}")
                train(*lessons, out, config, recipes.LoopConfig(**run, seed=machine.seed), machine.device)
            sys.stdout.write(f"{self.made} in {out / 'model'}\n")
            if (served := self.served(config)) is not None:
                known = {"method": method, "model": str((out / "model").resolve())}
                sys.stdout.write(f"serve it with {json.dumps(known | served)}\n")

        command.__doc__ = self.config.__doc__
        command.__annotations__["recipe"] = recipes.options_of(self.config, self.papers is not None)
        return grouped(command)

    def _run(self, steps: int | None, lr: float | None, loop: Any, is_papers: bool) -> dict[str, Any]:
        """Settings of the loop: the recipe's, and what was given in their place."""
        if steps is not None and loop.epochs is not None:
            raise ValueError(f"--steps {steps} and --epochs {loop.epochs} both say how long to train: give one of them")
        run = {"steps": self.steps, "lr": self.lr} | (self.paper_loop if is_papers else {})
        if steps is not None:
            run |= {"steps": steps, "epochs": 0}
        return run | ({} if lr is None else {"lr": lr}) | _given(loop)


def _given(options: Any) -> dict[str, Any]:
    """The options that were given; what an option is otherwise, the config or ``--start`` says."""
    return {name: value for name, value in options._asdict().items() if value is not None}


EAGLE3_START = "an EAGLE-3 drafter that `crossspec train eagle3` made"
DFLASH_START = "a DFlash drafter that `crossspec train dflash` made"


def _started(given: dict[str, Any]) -> dict[str, Any]:
    """The folder of ``--start`` as ``recipe.json`` has it."""
    return {**given, "start": str(Path(given["start"]).resolve())}


def _eagle3_settings(given: dict[str, Any]) -> dict[str, Any]:
    if "start" not in given:
        return given
    shared.check_start(Path(given["start"]), EAGLE3_START)
    for option, name in (("--draft-vocab", "draft_vocab_size"), ("--intermediate-size", "intermediate_size")):
        if name in given:
            raise ValueError(f"{option} {given[name]}: a drafter that goes on from --start keeps its own; leave it out")
    return _started(given)


def _confu_settings(given: dict[str, Any]) -> dict[str, Any]:
    shared.check_start(Path(given["start"]), EAGLE3_START)
    top, experts = given["top_experts"], given["num_experts"]
    if top > experts:
        raise ValueError(f"--top-experts {top} must be at most --experts {experts}, of which they are chosen")
    return _started(given)


def _dflash_settings(given: dict[str, Any]) -> dict[str, Any]:
    if "start" not in given:
        return given
    found = shared.check_start(Path(given["start"]), DFLASH_START)
    taps = (found.get("dflash_config") or {}).get("target_layer_ids") or ()
    own = {"num_layers": found.get("num_hidden_layers"), "num_target_layers": len(taps)}
    own |= {name: found.get(name) for name in ("intermediate_size", "block_size")}
    return {name: value for name, value in own.items() if value} | _started(given)


EAGLE3 = Trainer(recipes.Eagle3Config, 3000, 2e-3, _eagle3_settings)
DFLASH = Trainer(
    recipes.DFlashConfig, 3000, 2e-3, _dflash_settings, served=lambda config: chain_of(config.block_size - 1)
)
JETSPEC = DFLASH._replace(config=recipes.JetSpecConfig)
DART = Trainer(
    recipes.DartConfig,
    2200,
    2e-3,
    served=lambda config: {} if config.is_shifted else None,
    papers=recipes.DART_PAPER,
    paper_loop=recipes.DART_LOOP,
)
CONFU = Trainer(recipes.ConfuConfig, 1500, 2e-3, _confu_settings, papers=recipes.CONFU_PAPER)
DRAFT_MODEL = Trainer(
    recipes.DraftModelConfig, 4000, 3e-3, made="draft model", served=lambda config: chain_of(config.num_drafts)
)
TRAINERS = {
    "eagle3": EAGLE3,
    "dflash": DFLASH,
    "jetspec": JETSPEC,
    "dart": DART,
    "confu": CONFU,
    "draft_model": DRAFT_MODEL,
}
"""By kind of drafter, in the order of the registry."""
