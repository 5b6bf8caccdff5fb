"""Kernels around attention, and those of speculative decoding and sparse attention, emulated in torch on a CPU.

They have the real ones' signatures, check what these require of their arguments, and write only what these write.
"""

from __future__ import annotations

from types import ModuleType

import torch

INT32, INT64, FLOAT32, BFLOAT16 = torch.int32, torch.int64, torch.float32, torch.bfloat16


def need(dtype, *tensors):
    assert all(tensor.dtype == dtype and (tensor.numel() == 0 or tensor.stride(-1) == 1) for tensor in tensors)


def concat_mla_k(k, k_nope, k_rope):
    need(BFLOAT16, k, k_nope, k_rope)
    assert k_rope.shape[1] == 1
    k[..., : k_nope.shape[2]] = k_nope
    k[..., k_nope.shape[2] :] = k_rope


def concat_mla_absorb_q(a, b):
    need(BFLOAT16, a, b)
    return torch.cat((a, b), dim=-1)


def hadamard_transform(x, scale=1.0):
    assert isinstance(scale, float)
    matrix = torch.ones(1, 1)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (x.float() @ matrix * scale).to(x.dtype)


def mla_rope_quantize_fp8(
    q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox=True, quantize_dtype=None, quant_scale_q=1.0,
    quant_scale_kv=1.0, q_rope_out=None, k_rope_out=None, q_nope_out=None, k_nope_out=None, enable_pdl=False,
):  # fmt: skip
    assert not is_neox
    need(FLOAT32, cos_sin_cache)
    need(BFLOAT16, q_rope, k_rope, q_nope, k_nope)
    half = cos_sin_cache.shape[1] // 2
    cos, sin = cos_sin_cache[pos_ids, :half], cos_sin_cache[pos_ids, half:]
    for x, out, scale in ((q_rope, q_rope_out, quant_scale_q), (k_rope, k_rope_out, quant_scale_kv)):
        c, s = (each.view(-1, *[1] * (x.ndim - 2), half) for each in (cos, sin))
        even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
        turned = torch.stack((even * c - odd * s, odd * c + even * s), dim=-1).flatten(-2)
        out.copy_((turned * scale).clamp(-448, 448).to(quantize_dtype))
    q_nope_out.copy_((q_nope.float() * quant_scale_q).clamp(-448, 448).to(quantize_dtype))
    k_nope_out.copy_((k_nope.float() * quant_scale_kv).clamp(-448, 448).to(quantize_dtype))


def listed(score, lengths, topk, row_starts):
    """The positions of the largest scores of each row, in an order that is not theirs; -1 after the last one."""
    need(FLOAT32, score)
    need(INT32, lengths)
    found = torch.full((len(score), topk), -1, dtype=INT64)
    for row, length in enumerate(lengths.tolist()):
        start = 0 if row_starts is None else int(row_starts[row])
        own = score[row, start : start + length]
        chosen = own.topk(min(topk, length)).indices.sort().values if length > topk else torch.arange(length)
        found[row, : len(chosen)] = chosen
    return found


def fast_topk_v2(score, lengths, topk, row_starts=None):
    return listed(score, lengths, topk, row_starts).to(INT32)


def fast_topk_transform_fused(score, lengths, page_table_size_1, cu_seqlens_q, topk, row_starts=None):
    need(INT32, page_table_size_1, cu_seqlens_q)
    positions = listed(score, lengths, topk, row_starts)
    counts = cu_seqlens_q.diff().long()
    assert row_starts is not None or bool((counts == 1).all())
    table = page_table_size_1[torch.arange(len(counts)).repeat_interleave(counts)]
    slots = torch.cat((table, table.new_full((len(table), 1), -1)), dim=1)
    return slots.gather(1, positions % slots.shape[1])


def fast_topk_transform_ragged_fused(score, lengths, topk_indices_offset, topk, row_starts=None):
    need(INT32, topk_indices_offset)
    positions = listed(score, lengths, topk, row_starts)
    return torch.where(positions < 0, -1, positions + topk_indices_offset[:, None]).to(INT32)


def plan_topk_v2(seq_lens, static_threshold=-1, *, out=None):
    need(INT32, seq_lens)
    assert bool((seq_lens >= 0).all())
    return torch.zeros(len(seq_lens) + 1, 4, dtype=INT32)


def topk_transform_paged_v2(scores, seq_lens, page_tables, out_page_indices, page_size, metadata, out_raw_indices=None):
    need(INT32, page_tables, out_page_indices, metadata)
    assert page_size == 1 and len(metadata) == len(seq_lens) + 1 and scores.stride(0) % 4 == 0
    positions = listed(scores, seq_lens, out_page_indices.shape[1], None)
    slots = torch.cat((page_tables, page_tables.new_full((len(page_tables), 1), -1)), dim=1)
    out_page_indices.copy_(slots.gather(1, positions % slots.shape[1]))


def topk_transform_ragged_v2(scores, seq_lens, *, out_offsets, out_indices, row_starts=None):
    need(INT32, out_offsets, out_indices)
    assert scores.stride(0) % 4 == 0
    positions = listed(scores, seq_lens, out_indices.shape[1], row_starts)
    out_indices.copy_(torch.where(positions < 0, -1, positions + out_offsets[:, None]))


def fast_topk(values, topk, dim):
    return torch.max(values, dim=dim, keepdim=True) if topk == 1 else torch.topk(values, topk, dim=dim)


def build_tree_kernel_efficient(
    parent_list, selected_index, verified_seq_len, tree_mask, positions, retrive_index, retrive_next_token,
    retrive_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
):  # fmt: skip
    need(INT64, parent_list, selected_index, verified_seq_len, positions, retrive_index)
    need(INT64, retrive_next_token, retrive_next_sibling)
    need(torch.bool, tree_mask)
    assert tree_mask_mode == 0
    assert parent_list.shape[1] == topk * (depth - 1) + 1
    begin = 0
    for tree, length in enumerate(verified_seq_len.tolist()):
        kept, parents = selected_index[tree].tolist(), parent_list[tree].tolist()
        width = length + draft_token_num
        mask = tree_mask[begin : begin + draft_token_num * width].view(draft_token_num, width)[:, length:]
        mask.fill_(False)
        mask[:, 0] = True
        begin += draft_token_num * width
        positions[tree * draft_token_num] = length
        for node in range(draft_token_num - 1, 0, -1):
            entry = kept[node - 1] // topk
            parent = kept.index(parents[entry]) + 1 if entry else 0
            if retrive_next_token[tree, parent] != -1:
                retrive_next_sibling[tree, node] = retrive_next_token[tree, parent]
            retrive_next_token[tree, parent] = node
        for node in range(1, draft_token_num):
            depth_of_node, here = 0, node
            while here:
                mask[node, here] = True
                depth_of_node += 1
                entry = kept[here - 1] // topk
                here = kept.index(parents[entry]) + 1 if entry else 0
            positions[tree * draft_token_num + node] = length + depth_of_node
        retrive_index[tree] = torch.arange(tree * draft_token_num, (tree + 1) * draft_token_num)


def accept(outputs, trees, accepts, limit):
    """Walks each tree and writes what it accepts; returns the last accepted node and its place, tree by tree.

    `accepts` says whether a node is accepted: (tree, last accepted node, its place, node).
    """
    predicts, accept_index, accept_token_num = outputs
    candidates, places, first, following = trees
    need(INT32, *outputs)
    need(INT64, *trees)
    last = []
    for tree in range(len(candidates)):
        node, count = 0, 0
        place = int(places[tree, 0])
        accept_index[tree, 0] = place
        while count < limit:
            child = int(first[tree, node])
            while child != -1 and not accepts(tree, node, place, child):
                child = int(following[tree, child])
            if child == -1:
                break
            predicts[place] = candidates[tree, child]
            count, node, place = count + 1, child, int(places[tree, child])
            accept_index[tree, count] = place
        accept_token_num[tree] = count
        last.append((node, place))
    return last


def verify_tree_greedy(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    need(INT64, target_predict)
    target = target_predict.flatten()
    outputs, trees = (
        (predicts, accept_index, accept_token_num),
        (
            candidates,
            retrive_index,
            retrive_next_token,
            retrive_next_sibling,
        ),
    )
    limit = accept_index.shape[1] - 1
    for _, place in accept(outputs, trees, lambda t, _, p, node: candidates[t, node] == target[p], limit):
        predicts[place] = target[place]


def tree_speculative_sampling_target_only(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs, threshold_single=1.0,
    threshold_acc=1.0, deterministic=True,
):  # fmt: skip
    need(FLOAT32, uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs)
    outputs, trees = (
        (predicts, accept_index, accept_token_num),
        (
            candidates,
            retrive_index,
            retrive_next_token,
            retrive_next_sibling,
        ),
    )
    acc = torch.tensor(max(threshold_acc, 1e-9))
    tried = {}

    def accepts(tree, above, _, node):
        token = candidates[tree, node]
        probability = target_probs[tree, above, token]
        mass = tried[tree, above] = tried.get((tree, above), torch.zeros(())) + probability
        if probability > 0 and (uniform_samples[tree, above] < mass / acc or probability >= threshold_single):
            return True
        draft_probs[tree, above, token] = probability
        return False

    limit = accept_index.shape[1] - 1
    for tree, (node, place) in enumerate(accept(outputs, trees, accepts, limit)):
        drafted = 0 if accept_token_num[tree] == limit else draft_probs[tree, node]
        weights = (target_probs[tree, node] - drafted).clamp_min(0)
        sums = weights.cumsum(0)
        above = ((sums > uniform_samples_for_final_sampling[tree] * sums[-1]) & (weights > 0)).nonzero().flatten()
        positive = weights.nonzero().flatten()
        predicts[place] = above[0] if len(above) else positive[-1] if len(positive) else len(weights) - 1


def concat_and_cast_mha_k_triton(k, k_nope, k_rope):
    concat_mla_k(k, k_nope, k_rope)


def store_cache(k, v, k_cache, v_cache, indices, *, num_split=0, size_limit=0, reserved_skip_index=0):
    need(BFLOAT16, k, v, k_cache, v_cache)
    need(INT64, indices)
    written = indices != reserved_skip_index
    k_cache[indices[written]], v_cache[indices[written]] = k[written], v[written]


def set_mla_kv_buffer_triton(kv_buffer, loc, cache_k_nope, cache_k_rope, *, reserved_skip_index=0):
    need(BFLOAT16, kv_buffer, cache_k_nope, cache_k_rope)
    written = loc != reserved_skip_index
    kv_buffer[loc[written]] = torch.cat((cache_k_nope, cache_k_rope), dim=1)[written]


def softmax(logits, temperature=None, enable_pdl=None):
    need(FLOAT32, logits, temperature)
    return torch.softmax(logits * (1 / temperature)[:, None], dim=1)


def fused_inplace_qknorm(q, k, q_weight, k_weight, eps=1e-6, *, head_dim=0):
    for x, weight in ((q, q_weight), (k, k_weight)):
        need(BFLOAT16, x, weight)
        values = x.float()
        x.copy_(values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float())


def attend_to_pages(q, cache, seq_lens, page_table, sm_scale, value_dim):
    """Attention of one query a request to the tokens of its pages: output and lse in base 2, float32."""
    need(BFLOAT16, q, cache)
    need(INT32, seq_lens, page_table)
    output, lse = torch.zeros(*q.shape[:2], value_dim), torch.full(q.shape[:2], -torch.inf)
    for request, length in enumerate(seq_lens.tolist()):
        keys = cache[page_table[request].long()].flatten(0, 1)[:length].float()
        if length:
            logits = q[request].float() @ keys.T * sm_scale
            output[request] = torch.softmax(logits, dim=1) @ keys[:, :value_dim]
            lse[request] = torch.logsumexp(logits, dim=1) * 1.4426950408889634
    return output, lse


def cutlass_mla_get_workspace_size(max_seq_len, num_batches, sm_count=0, num_kv_splits=1):
    assert max_seq_len > 0
    assert num_batches > 0
    return num_batches * num_kv_splits * 128 * 513 * 4


def cutlass_mla_decode(q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace, sm_scale, num_kv_splits=1):
    assert page_table.shape[1] % (128 // kv_c_and_k_pe_cache.shape[1]) == 0
    assert workspace.dtype == torch.uint8
    query = torch.cat((q_nope, q_pe), dim=-1)
    output, _ = attend_to_pages(query, kv_c_and_k_pe_cache, seq_lens, page_table, sm_scale, q_nope.shape[2])
    return output.to(BFLOAT16)


def trtllm_batch_decode_with_kv_cache_mla(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
    max_seq_len, bmm1_scale=1.0, backend="auto", return_lse=False,
):  # fmt: skip
    assert query.shape[1] == kv_cache.shape[1] == 1
    assert query.shape[3] == kv_cache.shape[3] == kv_lora_rank + qk_rope_head_dim
    assert block_tables.shape[1] % (128 // kv_cache.shape[2]) == 0
    assert max_seq_len >= int(seq_lens.max())
    found = attend_to_pages(query[:, 0], kv_cache[:, 0], seq_lens, block_tables, bmm1_scale, kv_lora_rank)
    output = found[0].to(BFLOAT16).unsqueeze(1)
    return (output, found[1]) if return_lse else output


def trtllm_ragged_attention_deepseek(
    query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, o_sf_scale,
    batch_size, window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl, is_causal, return_lse, out=None, lse=None,
):  # fmt: skip
    need(BFLOAT16, query, key, value, out)
    need(INT32, seq_lens, cum_seq_lens_q, cum_seq_lens_kv)
    assert is_causal
    assert return_lse
    assert (len(seq_lens), int(seq_lens.max()), bmm2_scale, window_left) == (batch_size, max_kv_len, 1.0, -1)
    queries, keys = cum_seq_lens_q.tolist(), cum_seq_lens_kv.tolist()
    for request in range(batch_size):
        own_q = query[queries[request] : queries[request + 1]].float().transpose(0, 1)
        own_k, own_v = (x[keys[request] : keys[request + 1]].float().transpose(0, 1) for x in (key, value))
        logits = own_q @ own_k.transpose(1, 2) * bmm1_scale
        hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1 + logits.shape[2] - logits.shape[1])
        logits = logits.masked_fill(hidden, -torch.inf)
        rows = slice(queries[request], queries[request + 1])
        out[rows] = (torch.softmax(logits, dim=2) @ own_v).transpose(0, 1).to(BFLOAT16)
        lse[rows] = (torch.logsumexp(logits, dim=2) * 1.4426950408889634).T
    return out, lse


def modules():
    """Stand-ins of the libraries' modules, by name."""
    own = {name: value for name, value in globals().items() if callable(value)}
    made = {}
    for path in MODULES:
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    for name, module in made.items():
        module.__dict__.update(own)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    return made


MODULES = (
    "sgl_kernel",
    "sglang.kernels.ops.attention.concat_mla",
    "sglang.kernels.ops.attention.dsv4.topk",
    "sglang.kernels.ops.quantization.hadamard",
    "sglang.kernels.ops.kvcache.kvcache",
    "sglang.kernels.ops.layernorm.norm",
    "sglang.kernels.ops.attention.mla_qk_prep",
    "sglang.kernels.ops.speculative.sampling",
    "sglang.kernels.ops.speculative.tree",
    "sglang.srt.mem_cache.utils",
    "flashinfer.concat_ops",
    "flashinfer.decode",
    "flashinfer.prefill",
    "flashinfer.rope",
    "flashinfer.sampling",
)
