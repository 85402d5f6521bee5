// In place of src/cuda/ptx/matrix.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "cuda/ptx/shared.cuh"
#include "emulator/machine/tensor_core.h"

namespace onepass::ptx {

/// What a lane gives to and gets from ldmatrix and stmatrix.
struct MatrixRows {
  std::uint32_t address;
  std::uint32_t r[4];
};
/// Register m of lane 4 g + t holds elements 2 t and 2 t + 1 of row g of matrix m; transposed, of column g.
template <bool kStore, bool kTranspose>
void move_matrices(const char* what, MatrixRows& own) {
  emulator::together(what, own, [](MatrixRows* const* lanes) {
    for (int m = 0; m < 4; ++m) {
      unsigned char* rows[8];
      for (int row = 0; row < 8; ++row) rows[row] = emulator::shared(lanes[8 * m + row]->address, 16, 16);
      for (int lane = 0; lane < emulator::kWarp; ++lane) {
        auto* element = reinterpret_cast<unsigned char*>(&lanes[lane]->r[m]);
        for (int e = 0; e < 2; ++e, element += 2) {
          const int across = lane / 4, along = lane % 4 * 2 + e;
          unsigned char* place = kTranspose ? rows[along] + 2 * across : rows[across] + 2 * along;
          std::memcpy(kStore ? place : element, kStore ? element : place, 2);
        }
      }
    }
  });
}
inline void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t address) {
  MatrixRows own = {address, {}};
  move_matrices<false, false>("ldmatrix", own);
  std::memcpy(r, own.r, sizeof r);
}
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t address) {
  MatrixRows own = {address, {}};
  move_matrices<false, true>("ldmatrix.trans", own);
  std::memcpy(r, own.r, sizeof r);
}
inline void stmatrix_x4(std::uint32_t address, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2, std::uint32_t r3) {
  MatrixRows own = {address, {r0, r1, r2, r3}};
  move_matrices<true, false>("stmatrix", own);
}
inline void stmatrix_x4_trans(std::uint32_t address, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2,
                              std::uint32_t r3) {
  MatrixRows own = {address, {r0, r1, r2, r3}};
  move_matrices<true, true>("stmatrix.trans", own);
}

/// What a lane gives to and gets from mma.
struct Fragments {
  float (*c)[4];
  const std::uint32_t (*a)[4];
  std::uint32_t b[2];
};

/// Lane 4 g + t: register n of A holds elements 2 t and 2 t + 1 of row g + 8 (n % 2) of columns 8 (n / 2) on, register n
/// of B those of rows 8 n on, column g.
template <class T>
void mma_16x8x16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  Fragments own = {&c, &a, {b0, b1}};
  emulator::together("mma", own, [](Fragments* const* lanes) {
    emulator::Product<16> product;
    for (int lane = 0; lane < emulator::kWarp; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int n = 0; n < 4; ++n)
        emulator::widen<T>((*lanes[lane]->a)[n], &product.a[g + 8 * (n % 2)][2 * t + 8 * (n / 2)]);
      for (int n = 0; n < 2; ++n) emulator::widen<T>(lanes[lane]->b[n], &product.b[g][2 * t + 8 * n]);
      for (int e = 0; e < 4; ++e) product.c[g + 8 * (e / 2)][2 * t + e % 2] = (*lanes[lane]->c)[e];
    }
    product.add();
    for (int lane = 0; lane < emulator::kWarp; ++lane)
      for (int e = 0; e < 4; ++e) (*lanes[lane]->c)[e] = product.c[lane / 4 + 8 * (e / 2)][2 * (lane % 4) + e % 2];
  });
}

/// Lane 4 g + t: register n of A holds column t + 4 (n / 2) of row g + 8 (n % 2), register n of B row t + 4 n, column g.
inline void mma_16x8x8_tf32(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  Fragments own = {&c, &a, {b0, b1}};
  emulator::together("mma.tf32", own, [](Fragments* const* lanes) {
    const auto tf32 = [](std::uint32_t x) { return __uint_as_float(x & 0xffffe000u); };
    emulator::Product<8> product;
    for (int lane = 0; lane < emulator::kWarp; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int n = 0; n < 4; ++n) product.a[g + 8 * (n % 2)][t + 4 * (n / 2)] = tf32((*lanes[lane]->a)[n]);
      for (int n = 0; n < 2; ++n) product.b[g][t + 4 * n] = tf32(lanes[lane]->b[n]);
      for (int e = 0; e < 4; ++e) product.c[g + 8 * (e / 2)][2 * t + e % 2] = (*lanes[lane]->c)[e];
    }
    product.add();
    for (int lane = 0; lane < emulator::kWarp; ++lane)
      for (int e = 0; e < 4; ++e) (*lanes[lane]->c)[e] = product.c[lane / 4 + 8 * (e / 2)][2 * (lane % 4) + e % 2];
  });
}

}  // namespace onepass::ptx
