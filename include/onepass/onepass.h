/* onepass: exact fused attention. The C interface.
 *
 * Plain C99. Every function returns a status; none prints, aborts, throws, or leaves memory allocated after an error.
 * Every argument struct begins with its own size, so that a program built against an older header keeps working:
 * fill it with the matching ONEPASS_..._INIT, then set the fields you need.
 *
 * Shapes. q (batch, seq_q, heads_q, head_dim), k (batch, seq_k, heads_kv, head_dim), v (batch, seq_k, heads_kv,
 * head_dim_v), out (batch, seq_q, heads_q, head_dim_v), lse float32 (batch, heads_q, seq_q). heads_q is a multiple of
 * heads_kv; query head h reads KV head h / (heads_q / heads_kv). With cu_seqlens_q and cu_seqlens_k (varlen) the
 * operands are packed: q (total_q, heads_q, head_dim), lse (heads_q, total_q), and so on. The last dimension is
 * contiguous, every other stride is free (0 broadcasts an input). dtypes: float32, float16, bfloat16, one for all of
 * q, k, v, out and their gradients; float64 by the reference kernel.
 *
 * Meaning. s = scale * q.k, then softcap: c * tanh(s / c), then + ALiBi + bias, then the mask; out = softmax(s) v over
 * the visible keys. lse is the natural logarithm of the sum of exp(s). A row that sees no key gives out = 0,
 * lse = -inf and gradients 0. docs/semantics.md has every detail. */
#ifndef ONEPASS_ONEPASS_H
#define ONEPASS_ONEPASS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "onepass/dlpack.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ONEPASS_VERSION_MAJOR 0
#define ONEPASS_VERSION_MINOR 1
#define ONEPASS_VERSION_PATCH 0

#if defined(_WIN32)
#define ONEPASS_API __declspec(dllexport)
#else
#define ONEPASS_API __attribute__((visibility("default")))
#endif

typedef enum {
  ONEPASS_OK = 0,
  ONEPASS_INVALID_ARGUMENT = 1, /* inconsistent or malformed request; nothing was written */
  ONEPASS_UNSUPPORTED = 2,      /* a legal request that no kernel serves; nothing was written */
  ONEPASS_OUT_OF_MEMORY = 3,
  ONEPASS_DEVICE_ERROR = 4,
  ONEPASS_IO_ERROR = 5 /* the command line only */
} onepass_status_t;

typedef enum { ONEPASS_BOTTOM_RIGHT = 0, ONEPASS_TOP_LEFT = 1 } onepass_align_t;

/* Not an enum's type: whatever number a caller passes is a value, and one without a meaning is refused. */
typedef int32_t onepass_pass_t;
enum { ONEPASS_FORWARD = 0, ONEPASS_BACKWARD = 1, ONEPASS_DECODE = 2 };

/* Everything about a call that is not a tensor to read or write in full. A NULL `options` means all defaults. */
typedef struct {
  size_t struct_size;

  /* Mask: query row i sits at key position p(i) = i + (k_length - q_length) (bottom-right, the default), p(i) = i
   * (top-left), or i + q_position. causal: keys j <= p(i); window: p(i) - window_left <= j <= p(i) + window_right. */
  int32_t causal;
  int32_t align;       /* onepass_align_t */
  int64_t window_left; /* -1: unbounded */
  int64_t window_right;

  /* Packed sequences: int32 (batch + 1), from 0, non-decreasing, the last one at most the token count. */
  const DLTensor* cu_seqlens_q;
  const DLTensor* cu_seqlens_k;
  int64_t max_seqlen_q; /* needed with cu_seqlens: the longest sequence or more */
  int64_t max_seqlen_k;

  /* Padded batches: int32 (batch). The keys of item b are k_start[b] <= j < k_start[b] + k_length[b]. */
  const DLTensor* q_length;
  const DLTensor* k_start;
  const DLTensor* k_length;
  const DLTensor* q_position; /* key position of query 0, counted from the item's first key; replaces align */

  /* Scores. */
  double scale;                 /* NAN: 1 / sqrt(head_dim) */
  double softcap;               /* 0: none */
  const DLTensor* alibi_slopes; /* float32 (heads_q) or (batch, heads_q): adds -slope * |p(i) - j| */
  const DLTensor* bias;         /* float, broadcastable to (batch, heads_q, seq_q, seq_k), added after the cap */
  const DLTensor* sinks; /* float (heads_q): one more logit a row, neither scaled nor capped, carrying no value */

  /* Dropout on the probabilities: Philox4x32-7, the same mask on every backend; lse is undropped. */
  double dropout_p;
  uint64_t dropout_seed;
  uint64_t dropout_offset;       /* below 2^32 */
  const DLTensor* dropout_state; /* int64 (2): seed and offset in device memory; replaces the two above */

  /* Execution. */
  int32_t deterministic; /* -1: the kernel's documented default; 0; 1: the same bits in every run */
  int32_t validate;      /* 1: also refuse bad values in device memory (synchronises; host memory is always checked) */
  int32_t threads;       /* CPU: at most this many, 0: all the process may use */
  const char* kernel;    /* NULL: chosen by the registry; else one name of onepass_kernel_info */
  void* stream;          /* CUDA: cudaStream_t */
} onepass_options_t;

#define ONEPASS_OPTIONS_INIT                                                                                        \
  {                                                                                                                 \
    sizeof(onepass_options_t), 0, ONEPASS_BOTTOM_RIGHT, -1, -1, NULL, NULL, 0, 0, NULL, NULL, NULL, NULL, NAN, 0.0, \
        NULL, NULL, NULL, 0.0, 0, 0, NULL, -1, 0, 0, NULL, NULL                                                     \
  }

/* out = attention(q, k, v). */
typedef struct {
  size_t struct_size;
  const onepass_options_t* options;
  const DLTensor* q;
  const DLTensor* k;
  const DLTensor* v;
  const DLTensor* out; /* written; may be float32 whatever the inputs, for partial results that are merged later */
  const DLTensor* lse; /* written; NULL: not wanted */
  void* workspace;     /* onepass_workspace_size bytes, 64-byte aligned, of any content */
  size_t workspace_size;
} onepass_forward_args_t;

#define ONEPASS_FORWARD_ARGS_INIT \
  { sizeof(onepass_forward_args_t), NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0 }

/* Gradients of out and lse. grad_lse, grad_bias and grad_sinks may be NULL. */
typedef struct {
  size_t struct_size;
  const onepass_options_t* options;
  const DLTensor* q;
  const DLTensor* k;
  const DLTensor* v;
  const DLTensor* out; /* of the forward */
  const DLTensor* lse; /* of the forward, or the global one of a merge */
  const DLTensor* grad_out;
  const DLTensor* grad_lse; /* float32, shape of lse */
  const DLTensor* grad_q;   /* written, shape and dtype of q */
  const DLTensor* grad_k;
  const DLTensor* grad_v;
  const DLTensor* grad_bias;  /* written, float32 or the bias dtype, shape of bias */
  const DLTensor* grad_sinks; /* written, float32 or the sinks dtype, (heads_q) */
  void* workspace;
  size_t workspace_size;
} onepass_backward_args_t;

#define ONEPASS_BACKWARD_ARGS_INIT                                                                                 \
  {                                                                                                                \
    sizeof(onepass_backward_args_t), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        NULL, 0                                                                                                    \
  }

/* Attention over a key-value cache, written in place first where k_new and v_new are given.
 * cache_seqlens int32 (batch) counts the tokens already in the cache; query i of item b is the last but
 * seq_q - 1 - i token after the append. q (batch, seq_q, heads_q, head_dim), k_cache (batch, capacity, heads_kv,
 * head_dim), k_new (batch, seq_new, heads_kv, head_dim). */
typedef struct {
  size_t struct_size;
  const onepass_options_t* options; /* cu_seqlens, k_length and q_position are not for this call */
  const DLTensor* q;
  const DLTensor* k_cache;
  const DLTensor* v_cache;
  const DLTensor* cache_seqlens;
  const DLTensor* k_new; /* NULL: nothing to append */
  const DLTensor* v_new;
  const DLTensor* out;
  const DLTensor* lse;
  void* workspace;
  size_t workspace_size;
} onepass_decode_args_t;

#define ONEPASS_DECODE_ARGS_INIT \
  { sizeof(onepass_decode_args_t), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0 }

/* Merge of two partial results over disjoint sets of keys of the same queries:
 * lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.
 * An empty part (lse -inf) changes no bit of the other. out may be out_a or out_b, exactly; so may lse. */
typedef struct {
  size_t struct_size;
  const DLTensor* out_a; /* (batch, seq_q, heads_q, head_dim_v) or packed, float32 or a storage type */
  const DLTensor* lse_a; /* float32 */
  const DLTensor* out_b;
  const DLTensor* lse_b;
  const DLTensor* out;
  const DLTensor* lse;
  int32_t threads;
  void* stream;
} onepass_merge_args_t;

#define ONEPASS_MERGE_ARGS_INIT \
  { sizeof(onepass_merge_args_t), NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL }

typedef struct {
  size_t struct_size;
  const char* name;    /* "fwd_cpu_avx512" */
  const char* backend; /* "cpu" or "cuda" */
  const char* arch;    /* instruction set or compute capability */
  onepass_pass_t pass;
  const char* dtypes;   /* "f32 f16" */
  int64_t max_head_dim; /* the largest head_dim and head_dim_v */
  int32_t available;    /* 1: this machine can run it */
} onepass_kernel_info_t;

#define ONEPASS_KERNEL_INFO_INIT \
  { sizeof(onepass_kernel_info_t), NULL, NULL, NULL, ONEPASS_FORWARD, NULL, 0, 0 }

/* "0.1.0". */
ONEPASS_API const char* onepass_version(void);

ONEPASS_API onepass_status_t onepass_forward(const onepass_forward_args_t* args);
ONEPASS_API onepass_status_t onepass_backward(const onepass_backward_args_t* args);
ONEPASS_API onepass_status_t onepass_decode(const onepass_decode_args_t* args);
ONEPASS_API onepass_status_t onepass_merge(const onepass_merge_args_t* args);

/* Bytes of workspace for a call. `args` is the args struct of `pass`; data pointers may be NULL. */
ONEPASS_API onepass_status_t onepass_workspace_size(onepass_pass_t pass, const void* args, size_t* bytes);

/* What would run for a call and why, as one JSON object. `args` as for onepass_workspace_size. Writes at most
 * `capacity` bytes including the final 0 and sets *length to the text's full length without it. */
ONEPASS_API onepass_status_t onepass_explain(onepass_pass_t pass, const void* args, char* text, size_t capacity,
                                             size_t* length);

ONEPASS_API int32_t onepass_kernel_count(void);
ONEPASS_API onepass_status_t onepass_kernel_info(int32_t index, onepass_kernel_info_t* info);

/* "invalid argument". */
ONEPASS_API const char* onepass_status_string(onepass_status_t status);

/* The line that explains the last failure of this thread: rule, value, nearest supported choice. Never NULL. */
ONEPASS_API const char* onepass_last_error(void);

#ifdef __cplusplus
}
#endif
#endif /* ONEPASS_ONEPASS_H */
