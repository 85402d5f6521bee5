// Rows between a tensor's storage and float32 tiles: widening, rounding, transposes.
#pragma once

#include "core/problem.h"
#include "cpu/vec.h"

namespace onepass::cpu::ONEPASS_ISA {
namespace {

/// Calls f with the storage type of `dtype`, one of f32, f16, bf16.
template <class F>
ONEPASS_INLINE void with_storage(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f16: f(StoreF16{}); return;
    case DType::bf16: f(StoreBf16{}); return;
    default: f(StoreF32{}); return;
  }
}

template <class Store>
ONEPASS_INLINE const typename Store::Element* row_as(const Tensor& t, std::int64_t b, std::int64_t seq,
                                                     std::int64_t head) {
  return reinterpret_cast<const typename Store::Element*>(t.row(b, seq, head));
}
template <class Store>
ONEPASS_INLINE typename Store::Element* writable_row_as(const Tensor& t, std::int64_t b, std::int64_t seq,
                                                        std::int64_t head) {
  return reinterpret_cast<typename Store::Element*>(t.row(b, seq, head));
}

/// to[rows][pitch] = the rows seq ... of one head, 0 from dim to pitch; pitch is a multiple of kLanes.
inline void widen_rows(float* to, std::int64_t pitch, const Tensor& from, std::int64_t b, std::int64_t seq,
                       std::int64_t head, std::int64_t rows, std::int64_t dim) {
  const std::int64_t whole = dim / kLanes * kLanes;
  with_storage(
      from.dtype, [&](auto storage) __attribute__((always_inline)) {
        using Store = decltype(storage);
        for (std::int64_t r = 0; r < rows; ++r) {
          const auto* row = row_as<Store>(from, b, seq + r, head);
          float* out = to + r * pitch;
          for (std::int64_t c = 0; c < whole; c += kLanes) store(out + c, load_as_float<Store>(row + c));
          std::int64_t c = whole;
          if (c < dim) {
            store(out + c, load_part<Store>(row + c, dim - c));
            c += kLanes;
          }
          for (; c < pitch; c += kLanes) store(out + c, Vec{});
        }
      });
}

/// Rows seq ... of one head = from[rows][pitch] * scale, rounded to the storage type. No-op for an absent tensor.
/// A zero is +0 whatever the scale's sign, as clear_rows writes it: which of the two does may depend on the threads.
inline void store_rows(const Tensor& to, std::int64_t b, std::int64_t seq, std::int64_t head, std::int64_t rows,
                       std::int64_t dim, const float* from, std::int64_t pitch, float scale) {
  if (!to) return;
  const std::int64_t whole = dim / kLanes * kLanes;
  with_storage(
      to.dtype, [&](auto storage) __attribute__((always_inline)) {
        using Store = decltype(storage);
        for (std::int64_t r = 0; r < rows; ++r) {
          auto* row = writable_row_as<Store>(to, b, seq + r, head);
          const float* in = from + r * pitch;
          for (std::int64_t c = 0; c < whole; c += kLanes)
            store_from_float<Store>(row + c, load(in + c) * scale + Vec{});
          if (whole < dim) {
            Vec rest{};
            for (std::int64_t c = whole; c < dim; ++c) rest[c - whole] = in[c] * scale + 0.0f;
            store_part<Store>(row + whole, rest, dim - whole);
          }
        }
      });
}

/// Zeros. No-op for an absent tensor.
inline void clear_rows(const Tensor& to, std::int64_t b, std::int64_t seq, std::int64_t head, std::int64_t rows,
                       std::int64_t dim) {
  if (!to) return;
  for (std::int64_t r = 0; r < rows; ++r) {
    __builtin_memset(to.row(b, seq + r, head), 0, static_cast<std::size_t>(dim * dtype_size(to.dtype)));
  }
}

/// Transposes one kLanes x kLanes block: lane i of out[c] is lane c of in[i].
ONEPASS_INLINE void transpose_block(const Vec (&in)[kLanes], Vec (&out)[kLanes]) {
#if defined(__AVX512F__)
  __m512 t[16], u[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(in[2 * i], in[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(in[2 * i], in[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
    const __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
    u[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    u[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    u[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    u[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  // u[4 g + i] holds column 4 x + i of rows 4 g ... 4 g + 3 in its 128-bit part x: gather the parts over g.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 even01 = _mm512_shuffle_f32x4(u[i], u[4 + i], 0x88),
                 odd01 = _mm512_shuffle_f32x4(u[i], u[4 + i], 0xdd);
    const __m512 even23 = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0x88);
    const __m512 odd23 = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0xdd);
    out[i] = _mm512_shuffle_f32x4(even01, even23, 0x88);
    out[4 + i] = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
    out[8 + i] = _mm512_shuffle_f32x4(even01, even23, 0xdd);
    out[12 + i] = _mm512_shuffle_f32x4(odd01, odd23, 0xdd);
  }
#else
#pragma GCC unroll 8
  for (int c = 0; c < kLanes; ++c) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; ++i) out[c][i] = in[i][c];
  }
#endif
}

/// to[dim][width] = from[rows][pitch]^T, 0 in the lanes from `rows` to width (a multiple of kLanes). Elements of `from`
/// past dim are not used; from's rows may end there.
inline void transpose_rows(float* to, std::int64_t width, const float* from, std::int64_t pitch, std::int64_t rows,
                           std::int64_t dim) {
  for (std::int64_t i = 0; i < width; i += kLanes) {
    for (std::int64_t c = 0; c < dim; c += kLanes) {
      Vec in[kLanes], out[kLanes];
      const std::int64_t columns = min_of<std::int64_t>(kLanes, dim - c);
      if (columns == kLanes && i + kLanes <= rows) {  // unrolled, so that the block stays in registers
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) in[r] = load(from + (i + r) * pitch + c);
        transpose_block(in, out);
#pragma GCC unroll 16
        for (int x = 0; x < kLanes; ++x) store(to + (c + x) * width + i, out[x]);
        continue;
      }
      for (int r = 0; r < kLanes; ++r) {
        const float* p = from + (i + r) * pitch + c;
        in[r] = i + r >= rows ? Vec{} : columns == kLanes ? load(p) : load_part<StoreF32>(p, columns);
      }
      transpose_block(in, out);
      for (std::int64_t x = 0; x < columns; ++x) store(to + (c + x) * width + i, out[x]);
    }
  }
}

/// to[dim][pitch] = rows seq ... of one head, transposed, * scale, 0 in the lanes from `rows` to `width`.
inline void load_transposed(float* to, std::int64_t pitch, std::int64_t width, const Tensor& from, std::int64_t b,
                            std::int64_t seq, std::int64_t head, std::int64_t rows, std::int64_t dim, float scale) {
  with_storage(
      from.dtype, [&](auto storage) __attribute__((always_inline)) {
        using Store = decltype(storage);
        for (std::int64_t i = 0; i < width; i += kLanes) {
          for (std::int64_t c = 0; c < dim; c += kLanes) {
            Vec in[kLanes], out[kLanes];
            const std::int64_t columns = min_of<std::int64_t>(kLanes, dim - c);
            for (int r = 0; r < kLanes; ++r) {
              if (i + r >= rows) {
                in[r] = Vec{};
                continue;
              }
              const auto* p = row_as<Store>(from, b, seq + i + r, head) + c;
              in[r] = (columns == kLanes ? load_as_float<Store>(p) : load_part<Store>(p, columns)) * scale;
            }
            transpose_block(in, out);
            for (std::int64_t x = 0; x < columns; ++x) store(to + (c + x) * pitch + i, out[x]);
          }
        }
      });
}

/// Rows seq ... of one head = (from[dim][width] * lane_scale[width])^T, rounded to the storage type.
inline void store_transposed(const Tensor& to, std::int64_t b, std::int64_t seq, std::int64_t head, std::int64_t rows,
                             std::int64_t dim, const float* from, std::int64_t width, const float* lane_scale) {
  with_storage(
      to.dtype, [&](auto storage) __attribute__((always_inline)) {
        using Store = decltype(storage);
        for (std::int64_t i = 0; i < rows; i += kLanes) {
          const Vec factor = load(lane_scale + i);
          for (std::int64_t c = 0; c < dim; c += kLanes) {
            Vec in[kLanes], out[kLanes];
            const std::int64_t columns = min_of<std::int64_t>(kLanes, dim - c);
            for (std::int64_t x = 0; x < kLanes; ++x) {
              in[x] = x < columns ? load(from + (c + x) * width + i) * factor : Vec{};
            }
            transpose_block(in, out);
            for (std::int64_t r = 0; r < kLanes && i + r < rows; ++r) {
              auto* p = writable_row_as<Store>(to, b, seq + i + r, head) + c;
              if (columns == kLanes) {
                store_from_float<Store>(p, out[r]);
              } else {
                store_part<Store>(p, out[r], columns);
              }
            }
          }
        }
      });
}

}  // namespace
}  // namespace onepass::cpu::ONEPASS_ISA
