// A block for each row of a head: the formula as it stands, nothing in tiles.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/gradients.h"

namespace onepass::cuda_kit {
namespace {

constexpr int kThreads = 128;

/// Unit roundoff, and the smallest normal number.
template <class T>
struct Precision {
  static constexpr float kUnit = 0x1p-11f, kSmallest = 0x1p-14f;
};
template <>
struct Precision<__nv_bfloat16> {
  static constexpr float kUnit = 0x1p-8f, kSmallest = 0;
};

/// f(T()) of the type, which is f16 or bf16.
template <class F>
void for_type(DType dtype, F f) {
  if (dtype == DType::f16) return f(__half());
  f(__nv_bfloat16());
}

__device__ unsigned scrambled(unsigned x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

template <class T>
__global__ void fill_kernel(T* x, std::int64_t count, unsigned seed) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count; i += step) {
    const unsigned a = scrambled(static_cast<unsigned>(i) + seed * 0x9e3779b9u), b = scrambled(a + 0x85ebca6bu);
    const float radius = sqrtf(-2 * logf((static_cast<float>(a >> 8) + 1) * 0x1p-24f));
    x[i] = static_cast<T>(radius * cospif(static_cast<float>(b >> 8) * 0x1p-23f));
  }
}

template <class T>
__device__ double dot(const double* s_x, const T* g_y, int dim) {
  double sum = 0;
  for (int c = 0; c < dim; c += 8) {
    const uint4 words = *reinterpret_cast<const uint4*>(g_y + c);
    const T* const y = reinterpret_cast<const T*>(&words);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += s_x[c + i] * static_cast<float>(y[i]);
  }
  return sum;
}

/// The sum, or the largest, over the block.
template <class F>
__device__ double over_block(double x, double (&s)[kThreads], F f) {
  s[threadIdx.x] = x;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) s[threadIdx.x] = f(s[threadIdx.x], s[threadIdx.x + half]);
  }
  __syncthreads();
  const double all = s[0];
  __syncthreads();
  return all;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    expected_kernel(RowsOfQueries x, const T* g_q, const T* g_k, const T* g_v, const T* g_grad_out, T* g_out,
                    float* g_lse, float* g_grad_q, float* g_spread) {
  __shared__ double s_p[kMostKeysSeen], s_dp[kMostKeysSeen], s_q[256], s_grad[256], s_block[kThreads];
  const auto add = [](double a, double b) { return a + b; };
  const int head = static_cast<int>(blockIdx.x % x.heads_q), row = static_cast<int>(blockIdx.x / x.heads_q);
  const int kv_head = head / (x.heads_q / x.heads_kv), keys = x.keys[row];
  const std::int64_t at = static_cast<std::int64_t>(row) * x.heads_q + head;
  const std::int64_t first = static_cast<std::int64_t>(x.first_key[row]) * x.heads_kv + kv_head;
  g_k += first * x.dim, g_v += first * x.dim_v;
  const int k_stride = x.heads_kv * x.dim, v_stride = x.heads_kv * x.dim_v;
  for (int c = threadIdx.x; c < x.dim; c += kThreads) s_q[c] = static_cast<float>(g_q[at * x.dim + c]);
  for (int c = threadIdx.x; c < x.dim_v; c += kThreads) s_grad[c] = static_cast<float>(g_grad_out[at * x.dim_v + c]);
  __syncthreads();

  double most = -INFINITY, weight = 0;
  for (int j = threadIdx.x; j < keys; j += kThreads) {
    s_p[j] = x.scale * dot(s_q, g_k + j * k_stride, x.dim);
    s_dp[j] = dot(s_grad, g_v + j * v_stride, x.dim_v);
    most = fmax(most, s_p[j]);
  }
  most = over_block(most, s_block, [](double a, double b) { return fmax(a, b); });
  for (int j = threadIdx.x; j < keys; j += kThreads) weight += s_p[j] = exp(s_p[j] - most);
  weight = over_block(weight, s_block, add);

  double d = 0, d_spread = 0;
  for (int c = threadIdx.x; c < x.dim_v; c += kThreads) {
    double sum = 0;
    for (int j = 0; j < keys; ++j) sum += s_p[j] * static_cast<float>(g_v[j * v_stride + c]);
    sum /= weight;
    g_out[at * x.dim_v + c] = static_cast<T>(static_cast<float>(sum));
    d += s_grad[c] * sum, d_spread += fabs(s_grad[c] * sum);
  }
  d = over_block(d, s_block, add), d_spread = over_block(d_spread, s_block, add);

  constexpr double kSmallest = Precision<T>::kSmallest;  // below it a rounding is as large as at it
  for (int c = threadIdx.x; c < x.dim; c += kThreads) {
    double sum = 0, spread = 0;
    for (int j = 0; j < keys; ++j) {
      const double p = s_p[j] / weight, k = static_cast<float>(g_k[j * k_stride + c]);
      sum += p * (s_dp[j] - d) * k;
      spread += ((p + kSmallest) * (fabs(s_dp[j]) + d_spread) + kSmallest) * fabs(k);
    }
    g_grad_q[at * x.dim + c] = static_cast<float>(x.scale * sum);
    g_spread[at * x.dim + c] = static_cast<float>(x.scale * spread + kSmallest);
  }
  if (threadIdx.x == 0) {
    const std::int64_t item = row / x.item_rows;
    g_lse[(item * x.heads_q + head) * x.item_rows + row % x.item_rows] = static_cast<float>(most + log(weight));
  }
}

/// Counts i of [0, size) that are not right(i).
template <class F>
__device__ void count_not(std::int64_t size, unsigned* g_count, F right) {
  unsigned wrong = 0;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < size; i += step) {
    wrong += !right(i);  // a NaN is not
  }
  if (wrong != 0) atomicAdd(g_count, wrong);
}

template <class T>
__global__ void wrong_kernel(const T* got, const float* expected, const float* spread, std::int64_t size,
                             unsigned* g_count) {
  count_not(size, g_count, [=](std::int64_t i) {
    const float x = static_cast<float>(got[i]);
    return fabsf(x - expected[i]) <= 4 * Precision<T>::kUnit * (fabsf(expected[i]) + spread[i]);
  });
}

template <class T>
__global__ void other_sums_kernel(const T* a, const T* b, const float* spread, std::int64_t size, unsigned* g_count) {
  count_not(size, g_count, [=](std::int64_t i) {
    const float x = static_cast<float>(a[i]), y = static_cast<float>(b[i]);
    const float rounding = 2 * Precision<T>::kUnit * fmaxf(fmaxf(fabsf(x), fabsf(y)), Precision<T>::kSmallest);
    return fabsf(x - y) <= rounding + 0x1p-20f * spread[i];
  });
}

}  // namespace

void fill_normal(void* x, DType dtype, std::int64_t count, unsigned seed, cudaStream_t stream) {
  for_type(dtype, [=](auto t) { fill_kernel<<<1024, 256, 0, stream>>>(static_cast<decltype(t)*>(x), count, seed); });
}

void expected_gradient(const RowsOfQueries& x, const void* q, const void* k, const void* v, const void* grad_out,
                       void* out, float* lse, float* grad_q, float* spread, cudaStream_t stream) {
  for_type(x.dtype, [&](auto t) {
    using T = decltype(t);
    expected_kernel<<<static_cast<unsigned>(x.rows) * x.heads_q, kThreads, 0, stream>>>(
        x, static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v),
        static_cast<const T*>(grad_out), static_cast<T*>(out), lse, grad_q, spread);
  });
}

void count_wrong(const void* got, const float* expected, const float* spread, DType dtype, std::int64_t size,
                 unsigned* count, cudaStream_t stream) {
  for_type(dtype, [=](auto t) {
    wrong_kernel<<<1024, 256, 0, stream>>>(static_cast<const decltype(t)*>(got), expected, spread, size, count);
  });
}

void count_other_sums(const void* a, const void* b, const float* spread, DType dtype, std::int64_t size,
                      unsigned* count, cudaStream_t stream) {
  for_type(dtype, [=](auto t) {
    using T = decltype(t);
    other_sums_kernel<<<1024, 256, 0, stream>>>(static_cast<const T*>(a), static_cast<const T*>(b), spread, size,
                                                count);
  });
}

}  // namespace onepass::cuda_kit
