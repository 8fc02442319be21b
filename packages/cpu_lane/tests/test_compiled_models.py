"""A compiled model is called as it was traced: vLLM drops the guards, so that another type or form would be misread.

Engines of tests run uncompiled; what is compared here is how models are called, not what comes out of them.
"""

from typing import Any

import engines
import pytest
import torch

pytestmark = pytest.mark.e2e

TREE = {"num_nodes": 12, "depth": 3, "top_k": 3}
SPECS: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3", "model": str(engines.EAGLE3), "tree": {"type": "chain"}},
    "eagle3-tree": engines.tree("eagle3", engines.EAGLE3, **TREE),
    "dflash-tree": engines.tree("dflash", engines.DFLASH, num_nodes=12),
    "dart": {"method": "dart", "model": str(engines.POCKET / "dart")},
    "confu": {"method": "confu", "model": str(engines.CONFU), "num_speculative_tokens": 3},
    "confu-tree": engines.tree("confu", engines.CONFU, **TREE),
    "draft-model": {"method": "draft_model", "model": str(engines.POCKET / "draft-model"), "tree": {"type": "chain"}},
    "draft-model-tree": engines.tree("draft_model", engines.POCKET / "draft-model", **TREE),
}


def record_calls(worker: Any) -> None:
    """Keep the form of every call of a model that would be compiled: type, dimensions and strides of each argument."""
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    speculator = worker.model_runner.speculator
    worker.calls = {}
    for module in speculator.active.model.modules():
        if not isinstance(module, TorchCompileWithNoGuardsWrapper):
            continue
        kind = type(module)
        original = kind.__call__

        def call(self: Any, *given: Any, original: Any = original, **named: Any) -> Any:
            arguments = {**dict(enumerate(given)), **named}
            form = tuple((str(name), form_of(value)) for name, value in arguments.items() if value is not None)
            worker.calls.setdefault(type(self).__name__, set()).add(form)
            return original(self, *given, **named)

        kind.__call__ = call
        worker.changed = [*getattr(worker, "changed", []), (kind, original)]


def form_of(value: Any) -> Any:
    return (str(value.dtype), value.dim(), value.stride()) if isinstance(value, torch.Tensor) else repr(value)


def recorded(worker: Any) -> dict[str, set[Any]]:
    for kind, original in worker.changed:
        kind.__call__ = original
    return worker.calls


def called(spec: dict[str, Any]) -> dict[str, set[Any]]:
    """The forms in which the drafter's compiled parts were called, by class."""
    with engines.engine(spec) as llm:
        llm.collective_rpc(record_calls)
        engines.generate(llm, engines.prompts(2), max_tokens=12)
        found = llm.collective_rpc(recorded)[0]
    return found


@pytest.mark.parametrize("name", SPECS)
def test_every_call_has_the_form_of_the_first(name):
    found = called(SPECS[name])
    assert found and all(len(forms) == 1 for forms in found.values()), found


def test_ids_of_another_type_are_seen(monkeypatch):
    """What levels were once called with: the tree's own tokens, int64."""
    from vllm_crossspec.drafters.eagle3.tree_proposer import Eagle3TreeProposer

    original = Eagle3TreeProposer._forward_level

    def forward_level(self: Any, token_ids: torch.Tensor, *rest: Any) -> Any:
        return original(self, token_ids.long(), *rest)

    monkeypatch.setattr(Eagle3TreeProposer, "_forward_level", forward_level)
    found = called(SPECS["eagle3-tree"])
    assert any(len(forms) == 2 for forms in found.values())


def test_the_first_call_has_several_rows_with_one_request_at_a_time(monkeypatch):
    """Compiled for one row, a chain's drafter would return one row of the levels of a tree that shares it, too."""
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    from vllm_crossspec.routing.speculator import RoutedSpeculator

    first: dict[str, int] = {}
    original = RoutedSpeculator.load_model

    def load_model(self: Any, target_model: torch.nn.Module) -> None:
        original(self, target_model)
        for kind in {type(module) for one in self.proposers.values() for module in one.model.modules()}:
            if issubclass(kind, TorchCompileWithNoGuardsWrapper):
                monkeypatch.setattr(kind, "__call__", noting(kind.__call__))

    def noting(call: Any) -> Any:
        def noted(self: Any, *given: Any, **named: Any) -> Any:
            first.setdefault(type(self).__name__, rows_of([*given, *named.values()]))
            return call(self, *given, **named)

        return noted

    monkeypatch.setattr(RoutedSpeculator, "load_model", load_model)
    drafters = {
        "tree": {"type": "eagle3", "model": str(engines.EAGLE3), "tree": TREE},
        "chain": {"of": "tree", "num_speculative_tokens": 3},
        "dflash": {"model": str(engines.DFLASH)},
    }
    with engines.engine({"method": "whiflash", "drafters": drafters}, max_num_seqs=1) as llm:
        llm.collective_rpc(lambda worker: worker.model_runner.warming_up_model())
    assert first and all(rows > 1 for rows in first.values()), first


def rows_of(arguments: list[Any]) -> int:
    return next(value.shape[0] for value in arguments if isinstance(value, torch.Tensor))
