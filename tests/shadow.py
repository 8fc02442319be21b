"""Sent into a worker: drafters that are always active, beside the lazy ones, and a comparison of their caches."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

ROWS = 64
"""Rows of a product are padded to a multiple of this."""


def _layers(host: Any, name: str) -> list[Any]:
    """The attention layers of one drafter."""
    context = host.vllm_config.compilation_config.static_forward_context
    return [context[layer] for layer in sorted(host.proposers[name].draft_attn_layer_names)]


def pad_products(worker: Any) -> None:
    """Matrix products on a CPU sum in another order for a few rows, or a few rows a thread; from here on all have many.

    A token's keys then do not depend on how many other tokens are computed with it, which is what is to be compared.
    """
    linear = torch.nn.functional.linear

    def padded(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        rows = x.shape[0]
        if x.dim() != 2 or rows % ROWS == 0:
            return linear(x, weight, bias)
        return linear(torch.cat([x, x.new_zeros(-rows % ROWS, x.shape[1])]), weight, bias)[:rows]

    original = UnquantizedLinearMethod.apply

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        rows = x.shape[0]
        if x.dim() != 2 or rows % ROWS == 0:
            return original(self, layer, x, bias)
        return original(self, layer, torch.cat([x, x.new_zeros(-rows % ROWS, x.shape[1])]), bias)[:rows]

    UnquantizedLinearMethod.apply, torch.nn.functional.linear = apply, padded
    worker.unpadded = (original, linear)


def unpad(worker: Any) -> None:
    """Undo :func:`pad_products`."""
    UnquantizedLinearMethod.apply, torch.nn.functional.linear = worker.unpadded


def route_at_random(worker: Any, seed: int) -> None:
    """Routes come from a generator, whatever the router says; requests inside their prompts keep theirs."""
    generator, count = np.random.default_rng(seed), len(worker.model_runner.speculator.order)
    _route(worker, lambda num_reqs: generator.integers(0, count, num_reqs, dtype=np.int32))


def route_to(worker: Any, name: str) -> None:
    """All routes lead to one drafter."""
    number = worker.model_runner.speculator.order.index(name)
    _route(worker, lambda num_reqs: np.full(num_reqs, number, dtype=np.int32))


def _route(worker: Any, draw: Callable[[int], Any]) -> None:
    router = worker.model_runner.speculator.router
    decide = router.decide

    def drawn_routes(hidden: Any, rows: Any, idx_mapping: Any, num_sampled: Any, out: torch.Tensor, now: bool) -> None:
        decide(hidden, rows, idx_mapping, num_sampled, out, now)
        drawn = torch.from_numpy(draw(len(idx_mapping))).to(out.device)
        out[: len(idx_mapping)] = torch.where(out[: len(idx_mapping)] < 0, -1, drawn)

    router.decide = drawn_routes


class Written:
    """Keys and values by cache slot, as they were given to the cache: the cache itself packs them in tiles on a CPU."""

    def __init__(self, layer: Any, num_slots: int):
        shape = (num_slots, layer.num_kv_heads, layer.head_size)
        self.real = [torch.zeros(shape), torch.zeros(shape)]
        self.shadow = [torch.zeros(shape), torch.zeros(shape)]
        self.shadowing = False
        write = layer.impl.do_kv_cache_update

        def do_kv_cache_update(layer: Any, key: Any, value: Any, kv_cache: Any, slots: torch.Tensor) -> None:
            live = slots >= 0
            for kept, new in zip(self.shadow if self.shadowing else self.real, (key, value), strict=True):
                kept[slots[live].cpu()] = new[: len(slots)][live].float().cpu()
            if not self.shadowing:
                write(layer, key, value, kv_cache, slots)

        layer.impl.do_kv_cache_update = do_kv_cache_update


def keep_shadows(worker: Any) -> None:
    """Write every accepted token's keys and values at once, into a place of their own; compare after each round."""
    from vllm_crossspec.arrays import ranges
    from vllm_crossspec.catch_up.backlog import tokens_of

    host = worker.model_runner.speculator
    backlogs = host.backlogs
    num_slots = host.kv_cache_config.num_blocks * max(host.block_tables.block_sizes)
    written = {name: [Written(layer, num_slots) for layer in _layers(host, name)] for name in host.order}
    worker.compared, worker.differences = 0, []
    catch_up, settle, store, latest = backlogs.catch_up, backlogs.settle, backlogs.store, {}

    def remember(step: Any, slots: Any) -> None:
        latest.update(step=step, before=backlogs.computed[slots].copy())
        latest["tapped"] = [state.clone() for state in step.tapped_hidden_states]
        store(step, slots)

    def shadow(name: str, slots: Any) -> None:
        """What an always-active drafter does: this round's accepted tokens, now."""
        counts = backlogs.computed[slots] - latest["before"]
        firsts = latest["step"].batch.query_start_loc_np[: len(slots)].astype(np.int64)
        rows = torch.from_numpy(ranges(firsts, counts)).to(latest["tapped"][0].device)
        taps = [latest["tapped"][i].index_select(0, rows) for i in host.tap_indices[name]]
        features = host.proposers[name].fuse(torch.cat(taps, dim=-1))
        tokens = tokens_of(slots, latest["before"], np.cumsum(counts) - counts, counts)
        backlogs.queues[name].write_tokens(features, tokens)

    def compared_to(original: Any) -> Any:
        def compared_round(slots: Any, routes: Any) -> None:
            for name in host.order:
                for layer in written[name]:
                    layer.shadowing = True
                shadow(name, slots)
                for layer in written[name]:
                    layer.shadowing = False
            original(slots, routes)
            for name in host.order:
                _compare(worker, host, name, written[name])

        return compared_round

    # A round that does not wait knows what was accepted when the next one settles it.
    backlogs.store, backlogs.catch_up, backlogs.settle = remember, compared_to(catch_up), compared_to(settle)


def _compare(worker: Any, host: Any, name: str, written: list[Written]) -> None:
    """Every token that the drafter counts as cached, of every request."""
    from vllm_crossspec.arrays import ranges

    live = np.flatnonzero(host.backlogs.live)
    ends = host.backlogs.queues[name].cached[live]
    positions = torch.from_numpy(ranges(np.zeros_like(ends), ends))
    slots = torch.from_numpy(np.repeat(live, ends))
    group = host.proposers[name].kv_groups[0]
    size = host.block_tables.block_sizes[group]
    table = host.block_tables.block_tables[group].gpu.cpu()
    kv_slots = table[slots, positions // size].long() * size + positions % size
    for layer in written:
        for real, wanted in zip(layer.real, layer.shadow, strict=True):
            same = (real[kv_slots] == wanted[kv_slots]).flatten(1).all(dim=1)
            worker.compared += len(same)
            for i in torch.nonzero(~same).flatten().tolist()[:3]:
                worker.differences.append((name, int(slots[i]), int(positions[i])))


def comparison(worker: Any) -> tuple[int, list[Any]]:
    """Tokens compared, and the first that differed of each round."""
    return worker.compared, worker.differences


def forget_a_catch_up(worker: Any) -> None:
    """Every fifth catch-up writes nothing."""
    calls = itertools.count(1)

    def forgetful(queue: Any) -> Any:
        catch_up = queue.catch_up

        def some(slots: Any, ends: Any) -> None:
            if next(calls) % 5:
                catch_up(slots, ends)
            else:
                queue.cached[slots] = np.maximum(queue.cached[slots], ends)

        return some

    for queue in worker.model_runner.speculator.backlogs.queues.values():
        queue.catch_up = forgetful(queue)


def settle_too_much(worker: Any) -> None:
    """Rounds that do not wait count one more token as taken in than was accepted."""

    def more(queue: Any) -> Any:
        settle = queue.settle
        return lambda slots, ends: settle(slots, ends + 1)

    for queue in worker.model_runner.speculator.backlogs.queues.values():
        queue.settle = more(queue)


def never_flush(worker: Any) -> None:
    """Requests leave, and others share their blocks, without their drafters' having caught up."""
    backlogs = worker.model_runner.speculator.backlogs
    backlogs.keeps_prefixes = False
    original = backlogs.add_requests

    def add_requests(slots: list[int], num_computed: list[int]) -> None:
        original(slots, num_computed)
        backlogs._shares_prefix = False

    backlogs.add_requests = add_requests
