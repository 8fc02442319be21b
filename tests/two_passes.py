"""The GPU's algorithm on a CPU: a dense pass with its log-sum-exp, then our tail kernel, merged in place."""

import dataclasses

import torch
from crossspec_cpu_lane.vllm.attention import _requests, attend

from vllm_crossspec.trees.attention import base
from vllm_crossspec.trees.attention.scratch import write_level
from vllm_crossspec.trees.verify.naive import cap
from vllm_crossspec.types import FLOAT8


def in_two_passes(original):
    """What takes the place of ``TreeCpuImpl.forward``; batches without a tail go the original's way."""

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *fused, **options):
        metadata, tail = attn_metadata, None
        if metadata is not None:
            tail = metadata.draft_tail if layer.is_draft_layer else metadata.target_tail
        if tail is None:
            return original(self, layer, query, key, value, kv_cache, metadata, output, *fused, **options)
        num_rows, lengths = query.shape[0], metadata.seq_lens
        if layer.is_draft_layer:
            num_rows = tail.num_tokens
            write_level(key[:num_rows], value[:num_rows], tail)
        else:
            lengths = tail.prefix_len
            self._attend_all(layer, query, kv_cache, metadata, {}, output)  # the rest of a batch is vLLM's
        softmax = base.softmax_of(self, layer)
        cache, placed = _beside_each_other(self, kv_cache, metadata)
        rows = base.rows_of(query, output, torch.empty(self.num_heads, num_rows), placed, tail)
        if softmax.window:
            base.attend_window(rows, cache, placed, tail, softmax)
        else:
            for request, length in zip(_requests(metadata)[: tail.num_reqs], lengths.tolist(), strict=False):
                _dense_pass(self, layer, query, kv_cache, request, length, output, rows.lse)
        base.merge_tail(rows, cache, placed, tail, softmax)
        return output

    return forward


def _beside_each_other(impl, kv_cache, metadata):
    """The blocks of a batch as on a GPU, keys beside values, and the metadata that finds them there."""
    table = metadata.block_table[:, : -(-int(metadata.seq_lens.max()) // kv_cache.shape[2])]
    cache = torch.cat([view[table.flatten().long()] for view in impl.kv_views(kv_cache)], dim=-1)
    cache = cache.view(FLOAT8.get(impl.kv_cache_dtype, cache.dtype))
    places = torch.arange(table.numel(), dtype=torch.int32).view(table.shape)
    return cache, dataclasses.replace(metadata, block_table=places)


def _dense_pass(impl, layer, query, kv_cache, request, length, output, lse):
    """One request's rows over its first tokens: into ``output``, and the log-sum-exp [Hq, rows] into ``lse``."""
    rows, softmax = request.rows, base.softmax_of(impl)._replace(sinks=None)
    spans = impl.spans(layer, kv_cache, request, length)
    output[rows] = attend(query[rows], spans, torch.zeros(rows.stop - rows.start, 0), softmax)
    lse[:, rows] = -torch.inf
    if spans:
        keys = torch.cat([keys.float() for keys, _ in spans], dim=-1)
        each = keys.repeat_interleave(impl.num_heads // impl.num_kv_heads, dim=0)
        logits = cap(impl.scale * query[rows].float().transpose(0, 1) @ each, softmax.soft_cap)
        lse[:, rows] = logits.logsumexp(dim=-1)
