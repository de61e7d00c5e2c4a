/* C interface of libgptoss_trt.so: the operators of gpt-oss on Hopper (sm_90a), for any framework.
 *
 * Rules that hold for every function here:
 *  - It returns a gptoss_trt_status. On failure nothing was launched, no output was touched, and
 *    gptoss_trt_last_error() of the same thread says which value broke which limit.
 *  - It allocates nothing on the device, never synchronises and reads no device memory from the
 *    host, so every call can be captured in a CUDA graph. Work is put on the given stream only.
 *  - Pointers in argument structs are device pointers; the caller keeps them alive until the
 *    stream has passed the call. A struct begins with its own size in bytes: a library that knows
 *    a longer struct takes the missing tail as zero, one that knows a shorter struct refuses.
 */
#ifndef GPTOSS_TRT_H_
#define GPTOSS_TRT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define GPTOSS_TRT_API __attribute__((visibility("default")))
#else
#define GPTOSS_TRT_API
#endif

#define GPTOSS_TRT_ABI_VERSION 7

typedef enum gptoss_trt_status {
  GPTOSS_TRT_OK = 0,
  GPTOSS_TRT_INVALID_ARGUMENT = 1,    /* a null pointer, a size, an enum value, an alignment */
  GPTOSS_TRT_UNSUPPORTED = 2,         /* valid, but not on this card or in this plan */
  GPTOSS_TRT_WORKSPACE_TOO_SMALL = 3, /* the text says how many bytes are needed */
  GPTOSS_TRT_CUDA_ERROR = 4           /* the runtime refused a launch; the text has its words */
} gptoss_trt_status;

/* A cudaStream_t; null is the legacy default stream. */
typedef void* gptoss_trt_stream;

/* The version this library was built with (GPTOSS_TRT_ABI_VERSION). Never fails. A caller compares
 * it with the version it was written for before it calls anything else. */
GPTOSS_TRT_API int32_t gptoss_trt_abi_version(void);

/* The text of the calling thread's last failure, "" if there was none. Never fails; the pointer
 * stays valid until the same thread fails again. Success does not clear it. */
GPTOSS_TRT_API const char* gptoss_trt_last_error(void);

/* ---- moe_gemm_fp8: grouped expert product, FP8 with 128x128 weight scales ------------------- */

typedef enum gptoss_trt_moe_product {
  GPTOSS_TRT_MOE_GATE_UP = 1, /* x W^T + bias, SwiGLU, quantisation to e4m3 */
  GPTOSS_TRT_MOE_DOWN = 2     /* (h W^T + bias) x routing weight, to bf16 */
} gptoss_trt_moe_product;

/* How expert weights lie in memory. Both are layout sm90_v1 (see csrc/moe_gemm_fp8/layout.h) and
 * hold the same e4m3 values; on one plan they give the same bits, but for what PREFILL says. */
typedef enum gptoss_trt_moe_storage {
  GPTOSS_TRT_MOE_MXFP4 = 1,    /* 4-bit values, expanded exactly to e4m3 in registers */
  GPTOSS_TRT_MOE_FP8 = 2,      /* e4m3 */
  GPTOSS_TRT_MOE_FP8_TILES = 3 /* the same values in layout sm90_tiles_v1, for many rows an expert:
                                  plan AUTO or PREFILL, scale mode STATIC */
} gptoss_trt_moe_storage;

/* Groups of channels that share one scale in FP8 activations. */
typedef enum gptoss_trt_scale_mode {
  GPTOSS_TRT_SCALE_STATIC = 1,   /* the constant 2^-3 for all; no scale array */
  GPTOSS_TRT_SCALE_BLOCK128 = 2, /* amax / 448 of 128 channels */
  GPTOSS_TRT_SCALE_BLOCK64 = 3   /* amax / 448 of 64 channels */
} gptoss_trt_scale_mode;

typedef enum gptoss_trt_moe_plan {
  GPTOSS_TRT_MOE_PLAN_AUTO = 0,
  GPTOSS_TRT_MOE_PLAN_SIMT = 1,   /* CUDA cores, any shape: slow, the second opinion in tests */
  GPTOSS_TRT_MOE_PLAN_WGMMA = 2,  /* tensor cores, weights through registers: decode */
  GPTOSS_TRT_MOE_PLAN_PREFILL = 3 /* the same with blocks of up to 128 rows of an expert, which are
                                     first gathered into the workspace; k_split 0 or 1 only. MXFP4
                                     with scale mode STATIC and many rows an expert (GATE_UP 256 on
                                     average, DOWN 128) is expanded into FP8 tiles, and gives the
                                     bits that these give, where n is a multiple of 32, in DOWN of 8
                                   */
} gptoss_trt_moe_plan;

/* Launch with programmatic dependent launch: the kernel may start before the one ahead of it in
 * the stream has ended, and waits for it (griddepcontrol.wait) before it touches anything that is
 * not a weight. Right behind any kernel, launched either way: the wait covers all of that kernel's
 * writes. The kernels here release their own dependents (griddepcontrol.launch_dependents) early,
 * but behind their wait (norms and routers ahead of it); so a kernel that follows with the same
 * attribute must itself wait before it reads what they write, or overwrites what they read, and
 * then sees all that ran before them too. One that is launched the ordinary way need not know. */
#define GPTOSS_TRT_MOE_DEPENDENT_LAUNCH 1u
/* With DEPENDENT_LAUNCH: offsets and weights, on FP8 tiles row_slots and expert_weights too (never
 * activations), are read before the wait, which hides 2 to 5 us. The caller guarantees that these
 * were complete before the kernel directly ahead could start its dependents: they were written by a
 * kernel further ahead, and the one directly ahead, where it was launched dependently, releases its
 * dependents only behind its own wait (as GATE_UP does for DOWN). And nobody writes them again
 * before this call has read them: a later kernel that does waits. */
#define GPTOSS_TRT_MOE_ROUTING_READY 2u

typedef enum gptoss_trt_dtype { GPTOSS_TRT_BF16 = 1, GPTOSS_TRT_FP32 = 2 } gptoss_trt_dtype;

typedef struct gptoss_trt_moe_gemm_args {
  uint32_t size;      /* sizeof(gptoss_trt_moe_gemm_args) */
  uint32_t flags;     /* GPTOSS_TRT_MOE_* bits */
  int32_t product;    /* gptoss_trt_moe_product */
  int32_t storage;    /* gptoss_trt_moe_storage */
  int32_t scale_mode; /* gptoss_trt_scale_mode. GATE_UP: how out is quantised (x always has 1x128
                         scales). DOWN: how x was quantised. */
  int32_t plan;       /* gptoss_trt_moe_plan */
  int32_t k_split;    /* parts of K that different blocks sum, at most 8; 0 = chosen from the shape.
                         Results are equal bit for bit for equal plan and k_split only. */
  int32_t out_dtype;  /* gptoss_trt_dtype of DOWN's out; GATE_UP takes 0 */
  int32_t experts;    /* E, 1 to 1024 */
  int32_t tokens;     /* T, at least 0 */
  int32_t top_k;      /* slots per token, 1 to 32; rows P = T x top_k */
  int32_t n;          /* rows of one expert's weight: 2I (gate and up interleaved) or H; even */
  int32_t k;          /* columns of it: H or I; a multiple of 32 */
  float limit;        /* GATE_UP: gate <= limit, |up| <= limit */
  float alpha;        /* GATE_UP: gate x sigmoid(alpha x gate) x (up + 1) */
  int32_t max_tokens; /* the most tokens that this workspace was sized for, at least `tokens` */
  const void* weights; /* [E][gptoss_trt_moe_weight_bytes], 128-byte aligned */
  const void* bias;    /* bf16 [E, n], or null for none */
  const void* x; /* e4m3; GATE_UP [T, k] by token, DOWN [P, k] by sorted row; 16-byte aligned */
  const float* x_scale;          /* GATE_UP [ceil(k / 128), T]; DOWN [ceil(k / group), P], not read
                                    when STATIC */
  const int32_t* expert_offsets; /* [E + 1]: expert e owns the sorted rows [o[e], o[e + 1]) */
  const int32_t* row_slots;    /* [P]: sorted row -> token x top_k + slot, ascending in an expert */
  const float* expert_weights; /* [T, top_k] routing weights; DOWN only */
  void* out; /* GATE_UP: e4m3 [P, n / 2] by sorted row. DOWN: [T, top_k, n]. Rows behind o[E],
                and (token, slot) pairs that no row names, are not written. 8-byte aligned, 16 on
                FP8 tiles and where MXFP4 is expanded into such. */
  float* out_scale; /* GATE_UP: [ceil(n / 2 / group), P]; not written when STATIC */
  void* workspace;  /* 256-byte aligned; may be null when the query says 0 bytes */
  uint64_t workspace_bytes;
} gptoss_trt_moe_gemm_args;

/* *bytes = size of one expert's [n, k] weight in layout sm90_v1; a multiple of 128.
 * Fails with INVALID_ARGUMENT for an unknown storage, n below 2 or odd, k below 32 or no multiple
 * of 32, or a null bytes. */
GPTOSS_TRT_API gptoss_trt_status gptoss_trt_moe_weight_bytes(int32_t storage, int32_t n, int32_t k,
                                                             uint64_t* bytes);

/* *bytes = workspace of calls with these arguments and any `tokens` up to max_tokens; it reads the
 * enums and sizes only, so pointers may be null. A workspace belongs to one product, storage,
 * scale_mode, plan, k_split, experts, top_k, n, k and max_tokens: its layout depends on them.
 * Fails with INVALID_ARGUMENT as the call would. */
GPTOSS_TRT_API gptoss_trt_status
gptoss_trt_moe_gemm_fp8_workspace(const gptoss_trt_moe_gemm_args* args, uint64_t* bytes);

/* Puts the workspace (args->workspace, args->workspace_bytes) into the state that calls expect:
 * its counters at zero. Once per workspace, ahead of the first call; every call leaves the counters
 * at zero again. Two calls that may overlap in time need two workspaces. Enqueues one memset.
 * Fails with INVALID_ARGUMENT, WORKSPACE_TOO_SMALL or CUDA_ERROR. */
GPTOSS_TRT_API gptoss_trt_status
gptoss_trt_moe_gemm_fp8_prepare(const gptoss_trt_moe_gemm_args* args, gptoss_trt_stream stream);

/* Launches the product on the stream, the prefill plan a second, small kernel ahead of it, the
 * others one behind GATE_UP with BLOCK scales. Success means launched, not finished. tokens = 0
 * launches nothing. An expert without rows costs nothing; offsets outside [0, P] are undefined.
 * Fails with INVALID_ARGUMENT, UNSUPPORTED (a card below sm_90, a shape that the plan cannot hold),
 * WORKSPACE_TOO_SMALL or CUDA_ERROR. */
GPTOSS_TRT_API gptoss_trt_status gptoss_trt_moe_gemm_fp8(const gptoss_trt_moe_gemm_args* args,
                                                         gptoss_trt_stream stream);

/* ---- attention over the paged cache, with sinks -----------------------------------------------
 */

/* Launch with programmatic dependent launch, as GPTOSS_TRT_MOE_DEPENDENT_LAUNCH: tables, lengths
 * and, in decode, keys and values of tokens before this call's are read before the wait. The kernel
 * ahead, and those it has not waited for, must not write them. */
#define GPTOSS_TRT_ATTENTION_DEPENDENT_LAUNCH 1u

/* bf16, and e4m3 for `out` if asked. Query head h reads KV head h / 8; 64 columns a head. Key j of
 * sequence s is row j % block_tokens of block block_table[s, j / block_tokens - first_block[s]]. */
typedef struct gptoss_trt_attention_args {
  uint32_t size;     /* sizeof(gptoss_trt_attention_args) */
  uint32_t flags;    /* GPTOSS_TRT_ATTENTION_* bits */
  int32_t plan;      /* 0 = chosen from the shape. Decode: 1, 2, 3 = two, four, eight warps a
                        block, 4 = eight, a cut every 4,096 keys and any number of tokens a
                        sequence: a token's bits depend on its position and its keys alone.
                        Prefill: 1 = tiles of 24 queries, no window, 2 = of 16, 3, 4 = strips of
                        up to 512 or 128 tokens, a window of 128 */
  int32_t parts;     /* decode, no window: cut of a sequence's keys, at most 32; 0 = chosen from
                        tokens, kv_heads and table_width. Results are equal bit for bit for
                        equal cuts only. */
  int32_t tokens;    /* T, padding included */
  int32_t sequences; /* S */
  int32_t heads;     /* 8 x kv_heads */
  int32_t kv_heads;
  int32_t head_dim;     /* 64 */
  int32_t block_tokens; /* 16, 32 or 64; prefill takes 64 only */
  int32_t blocks;       /* of the cache */
  int32_t table_width;
  int32_t window;      /* keys p - window < j <= p are seen from position p; 0: j <= p */
  float scale;         /* of scores, positive; the sink is not scaled */
  const void* q;       /* [T, heads, 64], 16-byte aligned, as are the caches and out */
  const void* k_cache; /* [blocks, kv_heads, block_tokens, 64] */
  const void* v_cache;
  const int32_t* block_table;  /* [S, table_width] */
  const int32_t* first_block;  /* [S], or null for zeros */
  const int32_t* query_start;  /* [S + 1]; decode: or null, T / S tokens of every sequence */
  const int32_t* context_lens; /* [S]: keys of each sequence, this call's tokens among them */
  const void* sinks;           /* [heads] */
  void* out;                   /* bf16 [T, heads, 64], or e4m3 with out_scale */
  float* out_scale;            /* [heads / 2, T]: a scale for 128 columns of a token, or null */
  uint32_t* tickets; /* decode in parts: [T, kv_heads], zero ahead of the first call; every call
                        leaves zeros. Calls that may overlap in time need tickets of their own. */
  void* workspace;   /* decode in parts, 256-byte aligned: anything before and after a call */
  uint64_t workspace_bytes;
} gptoss_trt_attention_args;

/* *bytes = workspace of a decode call with these sizes; pointers may be null.
 * Fails with INVALID_ARGUMENT as the call would. */
GPTOSS_TRT_API gptoss_trt_status
gptoss_trt_attention_decode_workspace(const gptoss_trt_attention_args* args, uint64_t* bytes);

/* Few new tokens a sequence, the last of its context: for one token each, or for up to 8 on
 * average. A context of 0, and rows behind query_start[S], give zeros. Fails with INVALID_ARGUMENT,
 * UNSUPPORTED (more than 65,535 tokens or 8 a sequence, a number that S does not divide without
 * query_start, a card that is not sm_90), WORKSPACE_TOO_SMALL or CUDA_ERROR. */
GPTOSS_TRT_API gptoss_trt_status gptoss_trt_attention_decode(const gptoss_trt_attention_args* args,
                                                             gptoss_trt_stream stream);

/* Ragged chunks: tokens [query_start[s], query_start[s + 1]) are the last of sequence s's context.
 * Rows behind query_start[S] get zeros. Fails with INVALID_ARGUMENT, UNSUPPORTED (block_tokens that
 * is not 64, a plan that does not take this window, a card that is not sm_90) or CUDA_ERROR. */
GPTOSS_TRT_API gptoss_trt_status gptoss_trt_attention_prefill(const gptoss_trt_attention_args* args,
                                                              gptoss_trt_stream stream);

/* ---- dense_few: a product of 1 to 16 tokens, weights read once at the memory's speed -------- */

/* Launch with programmatic dependent launch: weights are read before the wait, nothing else. */
#define GPTOSS_TRT_DENSE_DEPENDENT_LAUNCH 1u

typedef enum gptoss_trt_dense_format {
  GPTOSS_TRT_DENSE_BF16 = 1,
  GPTOSS_TRT_DENSE_FP8 = 2 /* e4m3, activations 1x128, weights 128x128 */
} gptoss_trt_dense_format;

typedef struct gptoss_trt_dense_few_args {
  uint32_t size;             /* sizeof(gptoss_trt_dense_few_args) */
  uint32_t flags;            /* GPTOSS_TRT_DENSE_* bits */
  int32_t format;            /* gptoss_trt_dense_format, of x and weight */
  int32_t out_dtype;         /* gptoss_trt_dtype */
  int32_t tokens;            /* at most 16 */
  int32_t n;                 /* rows of weight */
  int32_t k;                 /* a multiple of 32 (BF16) or 64 (FP8), at most 4096 */
  int32_t first_segment;     /* FP8: rows of the first two segments, multiples of 8 or n; */
  int32_t second_segment;    /* each begins a new row of scales. n, 0 where there is one */
  const void* x;             /* [tokens, k], 16-byte aligned, as is weight */
  const float* x_scale;      /* FP8: [ceil(k / 128), tokens] */
  const void* weight;        /* [n, k] */
  const float* weight_scale; /* FP8: [rows of scales, ceil(k / 128)] */
  const void* bias;          /* bf16 [n], or null for none */
  void* out; /* [tokens, n] = x W^T + bias, fp32 sums rounded once. A token's bits do
                not depend on the other tokens. */
} gptoss_trt_dense_few_args;

/* Launches the product on the stream; success means launched, not finished. tokens = 0 launches
 * nothing, whatever the pointers. Fails with INVALID_ARGUMENT, UNSUPPORTED (a card that is not
 * sm_90) or CUDA_ERROR. */
GPTOSS_TRT_API gptoss_trt_status gptoss_trt_dense_few(const gptoss_trt_dense_few_args* args,
                                                      gptoss_trt_stream stream);

/* ---- dense_fp8: FP8 128x128 products of any number of tokens, on tensor cores ---------------- */

/* out = bf16(out + the product rounded to bf16): out is a residual in bf16. With parts 0 or 1 and
 * tiles of 128 or 256 tokens. */
#define GPTOSS_TRT_DENSE_ADDS 2u

typedef struct gptoss_trt_dense_fp8_args {
  uint32_t size;          /* sizeof(gptoss_trt_dense_fp8_args) */
  uint32_t flags;         /* GPTOSS_TRT_DENSE_DEPENDENT_LAUNCH, GPTOSS_TRT_DENSE_ADDS */
  int32_t out_dtype;      /* gptoss_trt_dtype */
  int32_t tokens;         /* at least 0 */
  int32_t n;              /* rows of weight, a multiple of 8 */
  int32_t k;              /* a multiple of 16 */
  int32_t first_segment;  /* rows of the first two segments, multiples of 8; each begins a */
  int32_t second_segment; /* new row of scales. n, 0 where there is one */
  int32_t tile_tokens;    /* 64, 128 or 256 of a block; 0 = chosen from the shape, as are parts */
  int32_t parts;          /* of K that different blocks sum, at most 8 and ceil(k / 128), 1 with
                             tile_tokens 256. Results are equal bit for bit for equal parts only. */
  const void* x;          /* e4m3 [tokens, k], 16-byte aligned, as are weight and out */
  const float* x_scale;   /* [ceil(k / 128), tokens] */
  const void* weight;     /* e4m3 [n, k] */
  const float* weight_scale; /* [rows of scales, ceil(k / 128)] */
  const void* bias;          /* bf16 [n], 8-byte aligned, or null for none */
  void* out;                 /* [tokens, n] = x W^T + bias, fp32 sums rounded once. A token's bits
                                do not depend on the other tokens, given the parts. */
  /* Rotation and append, where k_cache is not null: the segments are q, k and v in heads of 64
   * rows, `out` is q, bf16 [tokens, first_segment], of the sums rounded to bf16: first' = first cos
   * - second sin, second' = second cos + first sin for the halves of a head of q and k. Without q
   * (first_segment 0) out is not looked at. */
  int32_t kv_heads;         /* second_segment / 64, as many as v has */
  int32_t block_tokens;     /* a power of two up to 64 */
  const int32_t* positions; /* [tokens] */
  const int32_t* slots;     /* [tokens]: block * block_tokens + row; -1 keeps nothing */
  const float* cos_sin;     /* [positions, 64], 16-byte aligned: 32 cosines, then their sines */
  void* k_cache;            /* bf16 [blocks, kv_heads, block_tokens, 64], 16-byte aligned */
  void* v_cache;
} gptoss_trt_dense_fp8_args;

/* Launches the product on the stream; success means launched, not finished. tokens = 0 launches
 * nothing, whatever the pointers. Fails with INVALID_ARGUMENT, UNSUPPORTED (a card that is not
 * sm_90) or CUDA_ERROR. */
GPTOSS_TRT_API gptoss_trt_status gptoss_trt_dense_fp8(const gptoss_trt_dense_fp8_args* args,
                                                      gptoss_trt_stream stream);

/* ---- rmsnorm_quant: residual addition and norm ---------------------------------------------- */

/* Launch with programmatic dependent launch: gain is read before the wait, nothing else. */
#define GPTOSS_TRT_NORM_DEPENDENT_LAUNCH 1u

/* updated = bf16(residual + delta), or bf16(residual + sum of rows over the four slots, in their
 * order), or residual; normed = bf16 RMSNorm of it; (quantised, scales) = that in e4m3 with a scale
 * for 128 channels. */
typedef struct gptoss_trt_rmsnorm_quant_args {
  uint32_t size;             /* sizeof(gptoss_trt_rmsnorm_quant_args) */
  uint32_t flags;            /* GPTOSS_TRT_NORM_* bits */
  int32_t tokens;            /* T, at least 0 */
  int32_t hidden;            /* H, a multiple of 8 up to 4096 */
  int32_t first_expert;      /* with rows: experts [first, first + local) are this rank's, the */
  int32_t local_experts;     /* rows of others count as zero */
  float eps;                 /* of the norm */
  const void* residual;      /* bf16 [T, H], 16-byte aligned, as are delta, rows, gain, normed */
  void* updated;             /* bf16 [T, H], 16-byte aligned; may be residual */
  const void* delta;         /* bf16 [T, H], or null */
  const void* rows;          /* bf16 [T, 4, H], or null; with it no delta */
  const int32_t* expert_ids; /* with rows: [T, 4], 16-byte aligned */
  const void* gain;          /* bf16 [H] */
  void* normed;              /* bf16 [T, H], or null */
  void* quantised;           /* e4m3 [T, H], 8-byte aligned, or null */
  float* scales;             /* with quantised: [ceil(H / 128), T] */
} gptoss_trt_rmsnorm_quant_args;

/* Launches on the stream; success means launched, not finished. tokens = 0 launches nothing,
 * whatever the pointers. A token's results do not depend on the other tokens. Fails with
 * INVALID_ARGUMENT, UNSUPPORTED (a card that is not sm_90) or CUDA_ERROR. */
GPTOSS_TRT_API gptoss_trt_status gptoss_trt_rmsnorm_quant(const gptoss_trt_rmsnorm_quant_args* args,
                                                          gptoss_trt_stream stream);

/* ---- rmsnorm_route: the norm ahead of the experts and the routing behind it ----------------- */

/* Launch with programmatic dependent launch: gain, router and bias are read before the wait. */
#define GPTOSS_TRT_ROUTE_DEPENDENT_LAUNCH 1u

/* updated = bf16(residual + delta); (quantised, scales) = its RMSNorm in e4m3 with a scale for 128
 * channels; logits = bf16(norm x router^T + bias), the four best by (value, lowest index), their
 * softmax rounded to bf16; then the rows of this rank's experts by (expert, token, slot). */
typedef struct gptoss_trt_rmsnorm_route_args {
  uint32_t size;              /* sizeof(gptoss_trt_rmsnorm_route_args) */
  uint32_t flags;             /* GPTOSS_TRT_ROUTE_* bits */
  int32_t tokens;             /* T, 1 to 512; 32,768 with up to 32 experts and H up to 3072 */
  int32_t hidden;             /* H, a multiple of 8 up to 4096 */
  int32_t experts;            /* of the model, 4 to 128 */
  int32_t first_expert;       /* of this rank */
  int32_t local_experts;      /* E, of this rank */
  float eps;                  /* of the norm */
  const void* residual;       /* bf16 [T, H], 16-byte aligned, as are all [T, H] and [, H] here */
  const void* delta;          /* bf16 [T, H], or null for none */
  const void* gain;           /* bf16 [H] */
  const void* router;         /* bf16 [experts, H] */
  const void* bias;           /* bf16 [experts] */
  const int32_t* token_count; /* [1]: tokens behind the first so many are routed nowhere; or null */
  void* updated;              /* bf16 [T, H], another than residual; without delta it may be that */
  void* quantised;            /* e4m3 [T, H] */
  float* scales;              /* [ceil(H / 128), T] */
  int32_t* expert_ids;        /* [T, 4], 16-byte aligned, -1 for padding; as in the op */
  float* expert_weights;      /* [T, 4], 16-byte aligned, 0 for padding */
  int32_t* expert_offsets;    /* [E + 1] */
  int32_t* active_experts;    /* [E + 1]: their number, their ids, -1 behind them */
  int32_t* row_slots;         /* [4 T], -1 behind the last row */
  uint32_t* ticket;           /* [1]: zero ahead of the first call; every call leaves zero. Calls
                                 that may overlap in time need tickets of their own. */
} gptoss_trt_rmsnorm_route_args;

/* Launches on the stream; success means launched, not finished. A token's results do not depend on
 * the other tokens. tokens = 0 is refused. Fails with INVALID_ARGUMENT, UNSUPPORTED (a card that is
 * not sm_90) or CUDA_ERROR. */
GPTOSS_TRT_API gptoss_trt_status gptoss_trt_rmsnorm_route(const gptoss_trt_rmsnorm_route_args* args,
                                                          gptoss_trt_stream stream);

/* ---- route_rows: the rows of each expert, of many tokens ------------------------------------ */

typedef struct gptoss_trt_route_rows_args {
  uint32_t size;             /* sizeof(gptoss_trt_route_rows_args) */
  uint32_t flags;            /* GPTOSS_TRT_ROUTE_DEPENDENT_LAUNCH or 0: nothing is read ahead */
  int32_t tokens;            /* T, 1 to 32768 */
  int32_t first_expert;      /* of this rank */
  int32_t local_experts;     /* E, of this rank, 1 to 128 */
  const int32_t* expert_ids; /* [T, 4]: experts of other ranks, and -1, get no row */
  int32_t* expert_offsets;   /* [E + 1], as in rmsnorm_route, like the other outputs */
  int32_t* active_experts;   /* [E + 1] */
  int32_t* row_slots;        /* [4 T] */
} gptoss_trt_route_rows_args;

/* Sorts (token, slot) by (expert, token, slot), on the stream; success means launched, not
 * finished. Fails with INVALID_ARGUMENT, UNSUPPORTED (a card that is not sm_90) or CUDA_ERROR. */
GPTOSS_TRT_API gptoss_trt_status gptoss_trt_route_rows(const gptoss_trt_route_rows_args* args,
                                                       gptoss_trt_stream stream);

/* ---- decode_one: one token through all layers, in one launch -------------------------------- */

/* One layer of gpt-oss on the device, whole (no tensor parallelism). bf16 unless said otherwise;
 * everything 16-byte aligned. */
typedef struct gptoss_trt_decode_one_layer {
  const void* attention_norm; /* [2880] */
  const void* qkv_weight;     /* [5120, 2880], bf16 or e4m3 */
  const float* qkv_scale;     /* FP8: [40, 23] */
  const void* qkv_bias;       /* [5120] */
  const void* sinks;          /* [64] */
  const void* out_weight;     /* [2880, 4096], bf16 or e4m3 */
  const float* out_scale;     /* FP8: [23, 32] */
  const void* out_bias;       /* [2880] */
  const void* moe_norm;       /* [2880] */
  const void* router_weight;  /* [E, 2880] */
  const void* router_bias;    /* [E] */
  const void* gate_up_weight; /* MXFP4 in layout sm90_v1, [E] of [5760, 2880] */
  const void* gate_up_bias;   /* [E, 5760] */
  const void* down_weight;    /* MXFP4 in layout sm90_v1, [E] of [2880, 2880] */
  const void* down_bias;      /* [E, 2880] */
  void* k_cache;              /* [blocks, 8, block_tokens, 64] */
  void* v_cache;
  int64_t window; /* keys that a token sees, itself among them; 0: all of its context */
} gptoss_trt_decode_one_layer;

typedef struct gptoss_trt_decode_one_args {
  uint32_t size;        /* sizeof(gptoss_trt_decode_one_args) */
  int32_t format;       /* gptoss_trt_dense_format of qkv, out and lm_head */
  int32_t num_layers;   /* 1 to 36 */
  int32_t experts;      /* 4 to 128, at most the card's multiprocessors */
  int32_t vocabulary;   /* a multiple of 8 */
  int32_t block_tokens; /* of both pools: 16, 32 or 64 */
  int32_t full_width;   /* entries of full_blocks */
  int32_t window_width; /* entries of window_blocks */
  float eps;            /* of the norms */
  float limit;          /* SwiGLU, as in gptoss_trt_moe_gemm_args */
  float alpha;
  float scale;                               /* of attention scores, positive */
  const gptoss_trt_decode_one_layer* layers; /* [num_layers], on the host; read during the call */
  const void* embedding;                     /* bf16 [vocabulary, 2880] */
  const void* final_norm;                    /* bf16 [2880] */
  const void* lm_head;                       /* [vocabulary, 2880], bf16 or e4m3 */
  const float* lm_head_scale;                /* FP8: [ceil(vocabulary / 128), 23] */
  const float* cos_sin;                      /* [positions, 64]: 32 cosines, 32 sines */
  const int32_t* token_ids;                  /* [1] */
  const int32_t* positions;                  /* [1] */
  const int32_t* context_lens;               /* [1]: keys, the token's own among them; 0: padding,
                                                nothing is appended and nothing attended */
  const int32_t* full_blocks;                /* [full_width], of layers without a window */
  const int32_t* window_blocks;              /* [window_width], of layers with one */
  const int32_t* window_first_block;         /* [1] */
  float* logits;                             /* [vocabulary] */
  void* workspace; /* 256-byte aligned; zeros ahead of the first call, the library's own between
                      calls. Calls that may overlap in time need workspaces of their own. */
  uint64_t workspace_bytes;
} gptoss_trt_decode_one_args;

/* *bytes = workspace of a call. Fails with INVALID_ARGUMENT for a null bytes. */
GPTOSS_TRT_API gptoss_trt_status gptoss_trt_decode_one_workspace(uint64_t* bytes);

/* Launches the forward pass of one token: embedding, all layers (its key and value are written into
 * the caches), logits. h has the static scale. The launch takes every multiprocessor at once and
 * waits for them, so nothing else may hold one for good. Fails with INVALID_ARGUMENT, UNSUPPORTED
 * (a card that is not sm_90 or has fewer than 128 or more than 135 multiprocessors, more experts
 * than multiprocessors), WORKSPACE_TOO_SMALL or CUDA_ERROR. */
GPTOSS_TRT_API gptoss_trt_status gptoss_trt_decode_one(const gptoss_trt_decode_one_args* args,
                                                       gptoss_trt_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* GPTOSS_TRT_H_ */
