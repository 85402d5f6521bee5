// Instruction sets that both the processor and the operating system offer, and how many processors there are.
#include "cpu/host/machine.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>

#include "core/registry.h"
#include "cpu/parallel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace onepass {
namespace {

#if defined(__x86_64__)

struct Leaf {
  std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};
Leaf cpuid(std::uint32_t leaf, std::uint32_t subleaf = 0) {
  Leaf r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);  // leaves zeros if there is no such leaf
  return r;
}
bool has_bits(std::uint32_t word, std::initializer_list<int> bits) {
  for (int bit : bits) {
    if ((word >> bit & 1u) == 0) return false;
  }
  return true;
}

/// XCR0: the register state that the operating system saves.
std::uint64_t saved_state() {
  std::uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

/// Linux hands out the 8 KB of tile state on request only; a grant is for the whole process and its children.
bool request_tile_state() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Machine detect() {
  Machine machine;
  const Leaf vendor = cpuid(0), basic = cpuid(1), extended = cpuid(0x80000001u), features = cpuid(7),
             more = cpuid(7, 1);
  constexpr int kFma = 12, kSse42 = 20, kMovbe = 22, kPopcnt = 23, kOsxsave = 27, kAvx = 28, kF16c = 29;
  constexpr int kLzcnt = 5, kBmi1 = 3, kAvx2 = 5, kBmi2 = 8;
  if (!has_bits(basic.ecx, {kOsxsave})) return machine;
  const std::uint64_t saved = saved_state();
  const bool avx_saved = (saved & 0x6) == 0x6, avx512_saved = (saved & 0xe6) == 0xe6;
  const bool tiles_saved = (saved & 0x60000) == 0x60000;
  machine.avx2 = avx_saved && has_bits(basic.ecx, {kFma, kSse42, kMovbe, kPopcnt, kAvx, kF16c}) &&
                 has_bits(extended.ecx, {kLzcnt}) && has_bits(features.ebx, {kBmi1, kAvx2, kBmi2});
  constexpr int kF = 16, kDq = 17, kCd = 28, kBw = 30, kVl = 31;
  machine.avx512 = machine.avx2 && avx512_saved && has_bits(features.ebx, {kF, kDq, kCd, kBw, kVl});
  constexpr int kAvx512Bf16 = 5, kAmxBf16 = 22, kAmxTile = 24;
  machine.avx512bf16 = machine.avx512 && has_bits(more.eax, {kAvx512Bf16});
  machine.amx =
      machine.avx512bf16 && tiles_saved && has_bits(features.edx, {kAmxBf16, kAmxTile}) && request_tile_state();
  // Zen 4 issues vdpbf16ps at the rate of the float32 FMA, twice the work; Sapphire Rapids at less than half of it.
  machine.fast_bf16_dot = machine.avx512bf16 && std::memcmp(&vendor.ebx, "Auth", 4) == 0;
  return machine;
}

const char* model_name() {
  static char name[49] = {};
  if (cpuid(0x80000000u).eax < 0x80000004u) return "unknown";
  for (std::uint32_t i = 0; i < 3; ++i) {
    const Leaf part = cpuid(0x80000002u + i);
    std::memcpy(name + 16 * i, &part, 16);
  }
  const char* begin = name;
  while (*begin == ' ') ++begin;
  for (char* end = name + std::strlen(name); end != begin && end[-1] == ' ';) *--end = 0;
  return *begin != 0 ? begin : "unknown";
}

#else

Machine detect() {
  return {};
}

const char* model_name() {
#if defined(__aarch64__)
  return "aarch64";
#else
  return "unknown";
#endif
}

#endif

#if defined(__linux__)
/// Processors' worth of time that the control group grants, rounded up; 0: no limit known.
int quota() {
  long long limit = 0, period = 0;
  const auto read = [](const char* path, const char* format, long long* a, long long* b) {
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) return 0;
    const int fields = std::fscanf(file, format, a, b);
    std::fclose(file);
    return fields;
  };
  // Inside a container the group is the root; elsewhere the root has no limit. Version 2, then version 1.
  if (read("/sys/fs/cgroup/cpu.max", "%lld %lld", &limit, &period) != 2 &&
      (read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "%lld", &limit, nullptr) != 1 ||
       read("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "%lld", &period, nullptr) != 1)) {
    return 0;
  }
  return limit > 0 && period > 0 ? static_cast<int>((limit + period - 1) / period) : 0;
}

/// Processors in this thread's affinity mask; 0 if the system does not tell.
int affinity() {
  constexpr int kMaxSets = 64;
  cpu_set_t sets[kMaxSets];
  for (int n = 1; n <= kMaxSets; n *= 2) {  // the call fails while the mask is shorter than the kernel's
    if (sched_getaffinity(0, n * sizeof(cpu_set_t), sets) == 0) return CPU_COUNT_S(n * sizeof(cpu_set_t), sets);
  }
  return 0;
}
#endif

}  // namespace

const Machine& this_cpu() {
  static const Machine machine = detect();
  return machine;
}

const char* cpu_model_name() {
  static const char* const name = model_name();
  return name;
}

namespace cpu {

int default_threads() {
#if defined(__linux__)
  static const int limit = quota();
  int processors = affinity();
  if (limit > 0 && processors > limit) processors = limit;
#else
  int processors = static_cast<int>(std::thread::hardware_concurrency());
#endif
  return processors > 0 ? processors : 1;
}

}  // namespace cpu
}  // namespace onepass
