"""The GPU's algorithm on a CPU: a dense pass with its log-sum-exp, then our tail kernel, merged in place."""

import torch

from vllm_crossspec.engine.attention import base
from vllm_crossspec.engine.attention.cpu import _requests, attend
from vllm_crossspec.engine.attention.scratch import write_level, write_level_naive
from vllm_crossspec.twins import runs_kernels


def in_two_passes(original):
    """What takes the place of ``TreeCpuImpl.forward``; batches without a tail go the original's way."""

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *scales, **options):
        metadata, tail = attn_metadata, None
        if metadata is not None:
            tail = metadata.draft_tail if layer.is_draft_layer else metadata.target_tail
        if tail is None:
            return original(self, layer, query, key, value, kv_cache, metadata, output, *scales, **options)
        if layer.is_draft_layer:
            num_rows = tail.num_reqs * tail.queries_per_req
            write = write_level if runs_kernels() else write_level_naive
            write(key[:num_rows], value[:num_rows], tail)
            lse = torch.empty(self.num_heads, num_rows)
            for request in _requests(metadata)[: tail.num_reqs]:
                _dense_pass(self, query, kv_cache, request, request.length, None, output, lse)
            base.merge_draft_tail(query, output, lse, metadata, tail, self.scale)
            return output
        lse = torch.empty(self.num_heads, query.shape[0])
        for index, request in enumerate(_requests(metadata)):
            split = index < tail.num_reqs
            length = int(tail.prefix_len[index]) if split else request.length
            hidden = None if split else self._hidden(request)
            _dense_pass(self, query, kv_cache, request, length, hidden, output, lse)
        soft = base.soft_prompts_of(layer)
        base.merge_target_tail(query, output, lse, kv_cache, metadata, tail, tail.num_reqs, self.scale, soft)
        return output

    return forward


def _dense_pass(impl, query, kv_cache, request, length, hidden, output, lse):
    """One request's rows over its first tokens: into ``output``, and the log-sum-exp [Hq, rows] into ``lse``."""
    rows = request.rows
    keys, values = impl._halves(impl._gather(kv_cache, request, length))
    output[rows] = attend(query[rows], keys, values, hidden, impl.scale)
    each = keys.repeat_interleave(impl.num_heads // impl.num_kv_heads, dim=0)
    logits = impl.scale * query[rows].float().transpose(0, 1) @ each.transpose(1, 2)
    if hidden is not None:
        logits[..., logits.shape[-1] - hidden.shape[1] :] += hidden
    lse[:, rows] = logits.logsumexp(dim=-1)
