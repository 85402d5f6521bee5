// In place of src/cuda/ptx/registers.cuh.
#pragma once

#include "cuda_language.h"
#include "emulator/machine/units.h"

namespace onepass::ptx {

template <int kRegisters>
void registers_decrease() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  emulator::set_registers(kRegisters, false);
}
template <int kRegisters>
void registers_increase() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  emulator::set_registers(kRegisters, true);
}

template <class T, int kCount>
void keep(T (&)[kCount]) {}
template <class T>
T recomputed(T x) {
  return x;
}
inline unsigned successor(unsigned x) {
  return x + 1;
}

}  // namespace onepass::ptx
