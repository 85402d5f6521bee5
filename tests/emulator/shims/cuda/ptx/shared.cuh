// In place of src/cuda/ptx/shared.cuh.
#pragma once

#include <cstring>

#include "cuda_language.h"
#include "emulator/machine/units.h"

namespace onepass::ptx {

inline unsigned char* dynamic_shared() {
  return emulator::block().shared;
}
inline std::uint32_t shared_address(const void* pointer) {
  return emulator::shared_address(pointer);
}

template <class T, class... Rest>
void store_words(std::uint32_t address, T first, Rest... rest) {
  const T words[] = {first, rest...};
  std::memcpy(emulator::shared(address, sizeof words, sizeof words), words, sizeof words);
  emulator::stored(address, sizeof words);
}
template <class T, class... Rest>
void load_words(std::uint32_t address, T& first, Rest&... rest) {
  const unsigned char* from =
      emulator::shared(address, sizeof(T) * (1 + sizeof...(rest)), sizeof(T) * (1 + sizeof...(rest)));
  const auto take = [&](T& x) {
    std::memcpy(&x, from, sizeof x);
    from += sizeof x;
  };
  take(first);
  (take(rest), ...);
}

inline void store_shared(std::uint32_t address, std::uint32_t x) {
  store_words(address, x);
}
inline void store_shared(std::uint32_t address, std::uint32_t x, std::uint32_t y, std::uint32_t z, std::uint32_t w) {
  store_words(address, x, y, z, w);
}
inline void load_shared(std::uint32_t address, std::uint32_t& x, std::uint32_t& y, std::uint32_t& z, std::uint32_t& w) {
  load_words(address, x, y, z, w);
}
inline void load_shared(std::uint32_t address, float& x, float& y) {
  load_words(address, x, y);
}
inline void store_shared(std::uint32_t address, float x, float y, float z, float w) {
  store_words(address, x, y, z, w);
}
inline void load_shared(std::uint32_t address, float& x, float& y, float& z, float& w) {
  load_words(address, x, y, z, w);
}
template <int kCount>
void load_shared(std::uint32_t address, std::uint32_t (&x)[kCount]) {
  std::memcpy(x, emulator::shared(address, sizeof x, sizeof x), sizeof x);
}

}  // namespace onepass::ptx
