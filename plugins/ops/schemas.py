"""Signatures of `torch.ops.gptoss_trt.*`: one table, read by registration, checks, documentation and tests.

Invariant: an op writes only the arguments that its schema marks `(x!)`, returns nothing, hands out nothing that it
allocated and (on a GPU) reads no device data on the host, so every op can be captured in a CUDA graph. A CUDA
implementation takes its scratch memory from torch's caching allocator or from its own `prepare`. Knows no
implementation: `dispatch.py` does.

Conventions, for all ops:

- T tokens of a step, S sequences, H hidden, I intermediate of this rank, E experts of this rank, k experts per token.
- Indices are int32. A padding token (shape of a captured graph) stands behind the last real one: its slot is -1, its
  sequence's context_len is 0, and `token_count` (the last entry of query_start) does not count it.
- "fp32 or wider inside an op, bf16 between ops": residual stream, normed, q, attention output and expert rows are bf16.
- A quantised activation is a pair: values e4m3 [T, K], scales fp32 [ceil(K / group), T] with group 128 or 64.
  scale = amax / 448 by IEEE division, 1 where that is 0; value = x / scale (IEEE division, fp32), rounded to nearest
  even, saturated at 448. Group 0 is the static scale 2^-3: the scales argument is None.
- An FP8 weight is e4m3 [N, K] with fp32 scales [ceil(N / 128), ceil(K / 128)]; an MXFP4 weight is u8 [N, K/32, 16]
  with u8 scales [N, K/32] and means the FP8 128x128 weight of `reference/fp8_block.py`. Expert weights lead with E.
- Layout "plain" is that; "sm90_v1" (ops/weight_layout.py) is u8 [E, bytes] that holds its scales, and weight_scale then
  is an empty tensor whose dtype names the storage: uint8 MXFP4, float32 FP8.
- KV cache: k and v are separate tensors [blocks, kv_heads, block_tokens, head_dim], block_tokens <= 64, bf16 or e4m3.
  One head of one block is one contiguous run (8 KiB at 64 x 64 bf16: one bulk copy or one TMA box), in both pools, for
  prefill and decode alike. Slot of a token = block * block_tokens + position % block_tokens.
- Block tables are int32 [S, max blocks], unused entries -1. Logical block b of sequence s is
  `block_table[s, b - first_block[s]]`; first_block is None (zeros) in the full pool.
- 2-D tensors are row-major and contiguous; checks.py says so by name when one is not.
"""

from __future__ import annotations

from dataclasses import dataclass

NAMESPACE = "gptoss_trt"


@dataclass(frozen=True)
class OpSchema:
    """One op: its arguments in torch's schema language, and what it computes."""

    name: str
    arguments: str
    doc: str

    @property
    def definition(self) -> str:
        """The text for torch.library.Library.define."""
        return f"{self.name}({self.arguments}) -> ()"


_TABLE = (
    OpSchema(
        "embedding",
        "Tensor token_ids, Tensor weight, int first_row, Tensor(a!) out",
        """out[t] = weight[token_ids[t] - first_row], zeros where that row is not on this rank (vocabulary cut by rows).

        token_ids int32 [T]; weight bf16 [V, H]; out bf16 [T, H]. EXACT.""",
    ),
    OpSchema(
        "rmsnorm_quant",
        "Tensor(a!) residual, Tensor? delta, Tensor weight, float eps, "
        "Tensor(b!)? normed, Tensor(c!)? quantised, Tensor(d!)? scales",
        """residual = bf16(residual + delta) when delta is given; n = bf16(x * rsqrt(mean(x^2) + eps) * weight) of that
        rounded residual, fp32 inside; normed = n; (quantised, scales) = act_quant(n, 128).

        residual bf16 [T, H]; delta bf16 [T, H] or None; weight bf16 [H]; normed bf16 [T, H] or None; quantised e4m3
        [T, H] and scales fp32 [ceil(H / 128), T], both or neither. At least one of the outputs is given.""",
    ),
    OpSchema(
        "act_quant",
        "Tensor x, int group, Tensor(a!) quantised, Tensor(b!)? scales",
        """The quantisation rule above on x bf16 or fp32 [T, K]; group 128, 64 or 0 (static). EXACT: all
        implementations agree bit for bit. Never NaN from a finite input.""",
    ),
    OpSchema(
        "dense",
        "Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out",
        """out = x @ weight^T + bias, fp32 accumulation, rounded once to out's dtype.

        x bf16 [T, K]; weight bf16 [N, K]; bias bf16 [N] or None (a rank that does not add it); out bf16 or fp32 [T, N]
        (fp32: logits, and partial sums of a row-parallel product).""",
    ),
    OpSchema(
        "dense_fp8",
        "Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, int[] segments, Tensor? bias, Tensor(a!) out",
        """dense on a quantised activation (group 128) and an FP8 weight: fp32 promotion every 128 of K with
        x_scale * weight_scale, the bias starts the promoted accumulator. `segments` are row counts that add up to N;
        each begins a new row of scales (q, k and v of a rank); [] is one segment. Only at TP8, with segments of 64
        rows, or in small models is that another row than n // 128.

        x e4m3 [T, K]; x_scale fp32 [ceil(K / 128), T]; weight e4m3 [N, K]; weight_scale fp32 [sum of
        ceil(segment / 128), ceil(K / 128)]; bias bf16 [N] or None; out bf16 or fp32 [T, N].""",
    ),
    OpSchema(
        "dense_fp8_add",
        "Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, int[] segments, Tensor? bias, "
        "Tensor(a!) residual",
        """residual = bf16(residual + p), p the bf16 output of dense_fp8: one phase. Shapes as in that; residual bf16
        [T, N].""",
    ),
    OpSchema(
        "kv_slots",
        "Tensor positions, Tensor query_start, Tensor block_table, Tensor? first_block, int block_tokens, "
        "Tensor(a!) slots",
        """slots[t] = block_table[s, positions[t] // block_tokens - first_block[s]] * block_tokens
        + positions[t] % block_tokens for token t of sequence s, -1 for t >= query_start[S]. Once per step and pool.

        positions int32 [T]; query_start int32 [S + 1]; slots int32 [T]. EXACT.""",
    ),
    OpSchema(
        "rope_kv_append",
        "Tensor qkv, Tensor positions, Tensor cos_sin, Tensor slots, float k_scale, float v_scale, "
        "Tensor(a!) q, Tensor(b!) k_cache, Tensor(c!) v_cache",
        """q = rope(q part of qkv); k_cache[slot] = rope(k part); v_cache[slot] = v part. Halves (neox), not pairs:
        first' = first * cos - second * sin, second' = second * cos + first * sin, fp32 inside. Slot -1 writes no KV.

        qkv bf16 [T, (heads + 2 kv_heads) * head_dim], rows q, k, v; positions int32 [T]; cos_sin fp32 [max position,
        head_dim]: cos of head_dim / 2 angles, then their sin, both with YaRN's concentration (reference/rope.py makes
        it); slots int32 [T]; q bf16 [T, heads, head_dim]. An e4m3 cache stores saturate(k / k_scale) and
        saturate(v / v_scale); for bf16 caches both scales are 1. With no heads there are keys and values alone.""",
    ),
    OpSchema(
        "dense_fp8_rope_kv_append",
        "Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, int[] segments, Tensor? bias, Tensor positions, "
        "Tensor cos_sin, Tensor slots, float k_scale, float v_scale, Tensor(a!) q, Tensor(b!) k_cache, "
        "Tensor(c!) v_cache",
        """dense_fp8 into a bf16 qkv, then rope_kv_append of it: one phase. Shapes as in those two; segments are the
        rows of q (0 without heads), k and v.""",
    ),
    OpSchema(
        "attention_prefill",
        "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor? first_block, Tensor query_start, "
        "Tensor context_lens, Tensor sinks, int window, float scale, float k_scale, float v_scale, Tensor(a!) out",
        """Causal attention of ragged query chunks over the paged cache, which already holds this step's keys:
        query i of sequence s stands at position p = context_lens[s] - (query_start[s + 1] - query_start[s]) + i and
        sees keys j with p - window < j <= p (window 0: j <= p). out = sum softmax(q . k * scale, sink)_j v_j; the sink
        is one more logit per head in the denominator, not scaled, with no value.

        q, out bf16 [T, heads, head_dim]; heads = kv_heads * group, head h reads KV head h // group; query_start int32
        [S + 1]; context_lens int32 [S]; sinks bf16 [heads]; k_scale and v_scale multiply an e4m3 cache. Rows behind
        query_start[S] are written with zeros. Serves any mix of chunks and single tokens.""",
    ),
    OpSchema(
        "attention_decode",
        "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor? first_block, "
        "Tensor context_lens, Tensor sinks, int window, float scale, float k_scale, float v_scale, Tensor(a!) out",
        """attention_prefill for the same number of new tokens in every sequence: T / S, at most 8 (1 in plain decode).
        A KV range split over blocks merges (o, lse); the sink enters in the merge only. Sequences with context_len 0
        (padding) get zeros.""",
    ),
    OpSchema(
        "attention_prefill_quant",
        "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor? first_block, Tensor query_start, "
        "Tensor context_lens, Tensor sinks, int window, float scale, float k_scale, float v_scale, "
        "Tensor(a!) quantised, Tensor(b!) scales",
        """attention_prefill, then act_quant(out, 128) of a token's heads side by side: one phase.

        quantised e4m3 [T, heads * head_dim]; scales fp32 [ceil(heads * head_dim / 128), T].""",
    ),
    OpSchema(
        "attention_decode_quant",
        "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor? first_block, "
        "Tensor context_lens, Tensor sinks, int window, float scale, float k_scale, float v_scale, "
        "Tensor(a!) quantised, Tensor(b!) scales",
        """attention_decode with the output of attention_prefill_quant.""",
    ),
    OpSchema(
        "feed",
        "Tensor host, Tensor drawn, int source_at, Tensor(a!) memory, Tensor(b!) token_ids",
        """The inputs of a decode step of R rows: memory = host; token_ids[r] = drawn[source[r]], or host[r] where
        source[r] is negative, with source = host[source_at : source_at + R].

        host, memory int32 [N]; on a GPU host lies in pinned memory, which the kernel reads itself; drawn int32 [C], of
        the step before; token_ids int32 [R]. EXACT.""",
    ),
    OpSchema(
        "sample",
        "Tensor logits, Tensor temperature, Tensor share, Tensor? turn, Tensor(a!) tokens, Tensor(b!) fed",
        """tokens[turn, r] = the best column of logits[r] (the lowest of equals) where temperature[r] is 0, else the
        first whose cumulated softmax(logits[r] / temperature[r]) passes share[r], in the order of columns; -1 where a
        row holds NaN or its maximum is infinite. fed = max(tokens, 0): ids that exist, for the next step to read.

        logits fp32 [R, V], not changed; temperature, share fp32 [R], share in [0, 1); turn int32 [1] or None (0);
        tokens int32 [turns, C], C >= R, on a GPU in its memory or in pinned memory of the host; fed int32 [R]. TOKENS:
        sums may differ by rounding, so a share within rounding of a column's edge may take its neighbour.""",
    ),
    OpSchema(
        "moe_route",
        "Tensor x, Tensor weight, Tensor bias, Tensor? token_count, int first_expert, int num_local_experts, "
        "Tensor(a!) expert_ids, Tensor(b!) expert_weights, Tensor(c!) expert_offsets, Tensor(d!) active_experts, "
        "Tensor(e!) row_slots",
        """logits = bf16(x @ weight^T + bias), fp32 accumulation; the k best by (value, then lowest index); softmax over
        those k in fp32, rounded to bf16. Then the rows of this rank's experts [first_expert, first_expert +
        num_local_experts), sorted by (expert, token, slot).

        x bf16 [T, H]; weight bf16 [all experts, H]; bias bf16 [all experts]; token_count int32 [1] or None (all T);
        expert_ids int32 [T, k], global, best first, -1 for padding; expert_weights fp32 [T, k] (bf16 values, 0 for
        padding); expert_offsets int32 [E + 1]: rows of local expert e are [offsets[e], offsets[e + 1]);
        active_experts int32 [E + 1]: their number, then the local ids with rows, ascending, then -1; row_slots int32
        [T * k]: token * k + slot of each sorted row, -1 behind offsets[E].""",
    ),
    OpSchema(
        "rmsnorm_route",
        "Tensor residual, Tensor? delta, Tensor weight, float eps, Tensor router, Tensor router_bias, "
        "Tensor? token_count, int first_expert, int num_local_experts, Tensor(a!) updated, Tensor(b!) quantised, "
        "Tensor(c!) scales, Tensor(d!) expert_ids, Tensor(e!) expert_weights, Tensor(f!) expert_offsets, "
        "Tensor(g!) active_experts, Tensor(h!) row_slots",
        """rmsnorm_quant, then moe_route of its norm: updated = bf16(residual + delta); (quantised, scales) =
        act_quant(norm(updated), 128); the rest as moe_route(norm(updated), router, router_bias, ...). The residual is
        read only, and `updated` is another tensor; without delta it may be the residual itself.

        Shapes as in those two; router bf16 [all experts, H].""",
    ),
    OpSchema(
        "moe_gate_up",
        "Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor bias, Tensor expert_offsets, "
        "Tensor active_experts, Tensor row_slots, int top_k, float limit, float alpha, str layout, int h_group, "
        "Tensor(a!) h, Tensor(b!)? h_scale",
        """First expert product (stem moe_gemm_fp8): for sorted row r of expert e and token t = row_slots[r] // top_k,
        y = x[t] @ weight[e]^T + bias[e] (fp32 promotion every 128 of K, bias starts the promoted accumulator);
        gate = min(y[even], limit), up = clamp(y[odd], -limit, limit); a = gate * sigmoid(alpha * gate) * (up + 1) in
        fp32; (h[r], h_scale[:, r]) = act_quant(a, h_group). Rows behind expert_offsets[E] are not written. row_slots
        ascend within an expert, as moe_route gives them: kernels rely on it.

        x e4m3 [T, H]; x_scale fp32 [ceil(H / 128), T]; weight and weight_scale FP8 or MXFP4 of [E, 2I, H], rows
        interleaved gate, up (`layout` names another order of the bytes); bias bf16 [E, 2I]; h e4m3 [T * top_k, I];
        h_scale fp32 [ceil(I / h_group), T * top_k], None when h_group is 0 (static 2^-3).""",
    ),
    OpSchema(
        "moe_down",
        "Tensor h, Tensor? h_scale, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor expert_weights, "
        "Tensor expert_offsets, Tensor active_experts, Tensor row_slots, str layout, int h_group, Tensor(a!) out",
        """Second expert product: out[t, slot] = bf16(expert_weights[t, slot] * (h[r] @ weight[e]^T + bias[e])) for
        sorted row r with row_slots[r] = t * k + slot. The bias is inside the routing weight; None on the ranks that do
        not add it. (token, slot) pairs of other ranks' experts and of padding are not written.

        h e4m3 [T * k, I]; weight and weight_scale FP8 or MXFP4 of [E, H, I]; bias bf16 [E, H] or None; expert_weights
        fp32 [T, k]; out bf16 or fp32 [T, k, H].""",
    ),
    OpSchema(
        "moe_combine",
        "Tensor rows, Tensor expert_ids, int first_expert, int num_local_experts, bool accumulate, Tensor(a!) out",
        """out[t] = (out[t] if accumulate) + ((r0 + r1) + r2) + r3, fp32, one rounding to out's dtype; slots of experts
        that are not on this rank, and padding, count as zero whatever `rows` holds there. The sum over slots is formed
        first, from slot 0, then added to out.

        rows bf16 or fp32 [T, k, H]; expert_ids int32 [T, k]; out bf16 or fp32 [T, H]: the residual with accumulate,
        else a partial sum for the all-reduce.""",
    ),
    OpSchema(
        "moe_combine_norm",
        "Tensor rows, Tensor expert_ids, int first_expert, int num_local_experts, Tensor(a!) residual, Tensor weight, "
        "float eps, Tensor(b!)? normed, Tensor(c!)? quantised, Tensor(d!)? scales",
        """moe_combine with accumulate into residual, then rmsnorm_quant of it with the next layer's weight: one phase.
        Shapes as in those two.""",
    ),
)

SCHEMAS: dict[str, OpSchema] = {op.name: op for op in _TABLE}
