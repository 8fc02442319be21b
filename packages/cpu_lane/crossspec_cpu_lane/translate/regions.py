"""Regions that yield scalars: combiners and mapped functions."""

from collections.abc import Sequence

from crossspec_cpu_lane.translate.values import Value
from crossspec_cpu_lane.translate.writer import Writer
from crossspec_cpu_lane.ttir import Block, Op, Type


def region_values(w: Writer, blocks: list[Block], args: Sequence[str], types: Sequence[Type]) -> list[Value]:
    """What a region yields for scalars; one of several blocks (it returns early) assigns to variables."""
    if len(blocks) == 1:
        return w.combined(blocks[0], args)
    w.flush()
    results = [w.declared("yielded", t) for t in types]
    end = w.fresh("end")

    def leave(op: Op) -> None:
        w.assign(results, [w.get(n) for n in op.operands], parallel=False)
        w.emit(f"goto {end};")

    pairs = zip(args, blocks[0].args, strict=True)
    w.define([n for n, _ in blocks[0].args], [w.named(a, t) for a, (_, t) in pairs])
    outer = w.block_args, w.region
    w.counter += 1
    w.block_args, w.region = {}, w.counter
    w.exits.append(leave)
    w.blocks(blocks)
    w.exits.pop()
    w.block_args, w.region = outer
    w.emit(f"{end}:;")
    return results
