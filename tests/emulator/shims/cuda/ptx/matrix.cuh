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
  unsigned char row[16] = {};  // what ldmatrix found there when this lane came

  static MatrixRows load(std::uint32_t address) {
    MatrixRows own = {address, {}};
    std::memcpy(own.row, emulator::shared(address, 16, 16), sizeof own.row);
    return own;
  }
};
/// Register m of lane 4 g + t holds elements 2 t and 2 t + 1 of row g of matrix m; transposed, of column g.
template <bool kStore, bool kTranspose>
void move_matrices(const char* what, MatrixRows& own) {
  if (kStore) emulator::stored(own.address, 16);
  emulator::together(what, own, [](MatrixRows* const* lanes) {
    for (int m = 0; m < 4; ++m) {
      unsigned char* rows[8];
      for (int row = 0; row < 8; ++row) {
        MatrixRows& at = *lanes[8 * m + row];
        rows[row] = kStore ? emulator::shared(at.address, 16, 16) : at.row;
      }
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
  MatrixRows own = MatrixRows::load(address);
  move_matrices<false, false>("ldmatrix", own);
  std::memcpy(r, own.r, sizeof r);
}
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t address) {
  MatrixRows own = MatrixRows::load(address);
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
/// set(product, lane's fragments, g, t) puts those of lane 4 g + t of A and B into place.
template <int kK, class Set>
void multiply_add(const char* what, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                  Set&& set) {
  Fragments own = {&c, &a, {b0, b1}};
  emulator::together(what, own, [&](Fragments* const* lanes) {
    emulator::Product<kK> product;
    const auto each = [&](auto&& f) {
      for (int lane = 0; lane < emulator::kWarp; ++lane)
        for (int e = 0; e < 4; ++e) f((*lanes[lane]->c)[e], product.c[lane / 4 + 8 * (e / 2)][2 * (lane % 4) + e % 2]);
    };
    each([](float& r, float& x) { x = r; });
    for (int lane = 0; lane < emulator::kWarp; ++lane) set(product, *lanes[lane], lane / 4, lane % 4);
    product.add();
    each([](float& r, float& x) { r = x; });
  });
}

/// Lane 4 g + t: register n of A holds elements 2 t and 2 t + 1 of row g + 8 (n % 2) of columns 8 (n / 2) on, register
/// n of B those of rows 8 n on, column g.
template <class T>
void mma_16x8x16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  multiply_add<16>("mma", c, a, b0, b1, [](emulator::Product<16>& product, const Fragments& x, int g, int t) {
    for (int n = 0; n < 4; ++n) {
      float* row = &product.a[g + 8 * (n % 2)][2 * t + 8 * (n / 2)];
      emulator::widen<T>((*x.a)[n], row[0], row[1]);
    }
    for (int n = 0; n < 2; ++n)
      emulator::widen<T>(x.b[n], product.b[2 * t + 8 * n][g], product.b[2 * t + 8 * n + 1][g]);
  });
}

/// Lane 4 g + t: register n of A holds column t + 4 (n / 2) of row g + 8 (n % 2), register n of B row t + 4 n, column
/// g.
inline void mma_16x8x8_tf32(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  multiply_add<8>("mma.tf32", c, a, b0, b1, [](emulator::Product<8>& product, const Fragments& x, int g, int t) {
    const auto tf32 = [](std::uint32_t r) { return __uint_as_float(r & 0xffffe000u); };
    for (int n = 0; n < 4; ++n) product.a[g + 8 * (n % 2)][t + 4 * (n / 2)] = tf32((*x.a)[n]);
    for (int n = 0; n < 2; ++n) product.b[t + 4 * n][g] = tf32(x.b[n]);
  });
}

}  // namespace onepass::ptx
