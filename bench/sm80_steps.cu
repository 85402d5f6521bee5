// The steps of docs/sm80.md: the forward pass on mma.sync from its first form to the library's, each step one switch or
// one row of tiles away from the one before. Prints TFLOP/s of bf16, head_dim 128, 16,384 tokens, 16 heads, at a length
// without a mask, the same causal, and a short length causal; and the largest difference from the last step's output.
//   onepass_sm80_steps [FILE]   FILE: the same as JSON, for bench/results and bench/make_tables.py
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <vector>

#include "cuda/sm80/forward_kernel.cuh"

namespace {

using namespace onepass;
using namespace onepass::cuda::sm80;

constexpr int kHeadDim = 128, kHeads = 16, kTokens = 16384, kRounds = 7;

struct Cell {
  int seq;
  bool causal;
};
constexpr Cell kCells[] = {{4096, false}, {4096, true}, {512, true}};
constexpr int kCellCount = 3;

using T = __nv_bfloat16;

struct Buffers {
  T *q, *k, *v, *out;
  float* lse;
};

struct Step {
  const char* name;
  void (*run)(const Buffers&, const Cell&);
};

template <class P>
void run(const Buffers& b, const Cell& cell) {
  constexpr double kLog2e = 1.4426950408889634;
  ForwardArgs args{};
  Problem& p = args.problem;
  p.dtype = DType::bf16, p.batch = kTokens / cell.seq, p.seq_q = p.seq_k = p.total_q = p.total_k = cell.seq;
  p.heads_q = p.heads_kv = kHeads, p.head_dim = p.head_dim_v = kHeadDim, p.mask.causal = cell.causal;
  const auto tensor = [&](T* data) {
    return Tensor{data, DType::bf16, std::int64_t{cell.seq} * kHeads * kHeadDim, kHeads * kHeadDim, kHeadDim};
  };
  args.x = {tensor(b.q), tensor(b.k), tensor(b.v), tensor(b.out), {b.lse, kHeads * cell.seq, cell.seq}};
  args.q_alignment = args.k_alignment = args.v_alignment = args.out_alignment = 16;
  args.scale_log2 = static_cast<float>(kLog2e / std::sqrt(double{kHeadDim})), args.q_factor = 1;
  const unsigned tiles = (cell.seq + P::kTiles.block_q() - 1) / P::kTiles.block_q();
  const unsigned heads = static_cast<unsigned>(p.batch) * kHeads;
  args.set_places(
      tiles, P::kSections && cell.causal ? std::clamp((32u << 20) / (cell.seq * kHeadDim * 4u), 1u, heads) : 1);
  const auto kernel = forward_kernel<T, kHeadDim, P>;
  const int shared = static_cast<int>(P::kTiles.shared_bytes(kHeadDim));
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  kernel<<<tiles * heads, P::kTiles.threads(), shared>>>(args);
}

// Each plan: rows of 16 a warp, keys a block, sections of heads or not, then ForwardSteps.
#define ONEPASS_PLAN(name, rows, keys, sections, ...)                    \
  struct name {                                                          \
    static constexpr ForwardTiles kTiles = {rows, 4, keys, 2, 2, false}; \
    static constexpr ForwardSteps kUse = {__VA_ARGS__};                  \
    static constexpr bool kSections = sections;                          \
  };
constexpr Copies kRegisters = Copies::registers, kCounted = Copies::counted, kPredicated = Copies::predicated;
constexpr Maximum kExact = Maximum::exact, kLazy = Maximum::lazy, kChecked = Maximum::checked;
//                          swizzle, copies, ahead, fragments, maximum, behind, last tiles first
ONEPASS_PLAN(Plain, 1, 64, false, false, kRegisters, false, false, kExact, false, false)
ONEPASS_PLAN(Swizzled, 1, 64, false, true, kRegisters, false, false, kExact, false, false)
ONEPASS_PLAN(Asynchronous, 1, 64, false, true, kCounted, false, false, kExact, false, false)
ONEPASS_PLAN(LoadAhead, 1, 64, false, true, kCounted, true, false, kExact, false, false)
ONEPASS_PLAN(FragmentsAhead, 1, 64, false, true, kCounted, true, true, kExact, false, false)
ONEPASS_PLAN(ThirtyTwoRows, 2, 64, false, true, kCounted, true, true, kExact, false, false)
ONEPASS_PLAN(LazyRescale, 2, 64, false, true, kCounted, true, true, kLazy, false, false)
ONEPASS_PLAN(CheckedSums, 2, 64, false, true, kCounted, true, true, kChecked, false, false)
ONEPASS_PLAN(Predicated, 2, 64, false, true, kPredicated, true, true, kChecked, false, false)
ONEPASS_PLAN(BehindScores, 2, 64, false, true, kPredicated, true, true, kChecked, true, false)
ONEPASS_PLAN(SmallerBlocks, 2, 48, false, true, kPredicated, true, true, kChecked, true, false)
ONEPASS_PLAN(LastFirst, 2, 48, false, true, kPredicated, true, true, kChecked, true, true)
ONEPASS_PLAN(Sections, 2, 48, true, true, kPredicated, true, true, kChecked, true, true)
struct Library {
  static constexpr ForwardTiles kTiles = roomy_forward_tiles<kHeadDim>();
  static constexpr ForwardSteps kUse = {};
  static constexpr bool kSections = true;
};

const Step kStepList[] = {
    {"tensor cores, 16 rows a warp", &run<Plain>},      {"swizzled tiles", &run<Swizzled>},
    {"asynchronous copies", &run<Asynchronous>},        {"the next block loaded ahead", &run<LoadAhead>},
    {"fragments fetched ahead", &run<FragmentsAhead>},  {"32 rows a warp", &run<ThirtyTwoRows>},
    {"O rescaled only when needed", &run<LazyRescale>}, {"sums checked, no maximum taken", &run<CheckedSums>},
    {"copies of one instruction", &run<Predicated>},    {"copies behind Q K^T", &run<BehindScores>},
    {"48 keys a block", &run<SmallerBlocks>},           {"the last tiles first", &run<LastFirst>},
    {"heads in sections of the L2", &run<Sections>},    {"64 keys a block, unspilled", &run<Library>},
};
constexpr int kStepCount = sizeof(kStepList) / sizeof(kStepList[0]);

/// N(0, 1) by Box and Muller from a hash of the index.
__global__ void fill(T* g_x, unsigned count, unsigned seed) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const auto uniform = [](unsigned x) {
    x = (x ^ 61) ^ (x >> 16), x *= 9, x ^= x >> 4, x *= 0x27d4eb2d, x ^= x >> 15;
    return (static_cast<float>(x >> 8) + 0.5f) / 16777216.0f;
  };
  const float radius = sqrtf(-2 * logf(uniform(2 * i + seed)));
  g_x[i] = __float2bfloat16(radius * cospif(2 * uniform(2 * i + 1 + seed)));
}

struct Result {
  double milliseconds, tflops, difference;
};

/// One object, rows as `onepass bench --json` names them.
bool write_json(const char* path, const Result (&results)[kStepCount][kCellCount]) {
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) return false;
  cudaDeviceProp device;
  cudaGetDeviceProperties(&device, 0);
  int driver = 0;
  cudaDriverGetVersion(&driver);
  const std::time_t now = std::time(nullptr);
  char date[16];
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
  std::fprintf(file, "{\"date\": \"%s\", \"device\": {\"name\": \"%s\", \"driver\": \"%d.%d\"},\n \"rows\": [", date,
               device.name, driver / 1000, driver % 1000 / 10);
  for (int s = 0; s < kStepCount; ++s) {
    for (int c = 0; c < kCellCount; ++c) {
      const Result& r = results[s][c];
      std::fprintf(file,
                   "%s\n  {\"step\": \"%s\", \"dtype\": \"bf16\", \"head_dim\": %d, \"heads_q\": %d, \"batch\": %d, "
                   "\"seq_q\": %d, \"causal\": %s, \"ms_median\": %.4f, \"tflops\": %.1f, \"max_difference\": %.2g}",
                   s + c == 0 ? "" : ",", kStepList[s].name, kHeadDim, kHeads, kTokens / kCells[c].seq, kCells[c].seq,
                   kCells[c].causal ? "true" : "false", r.milliseconds, r.tflops, r.difference);
    }
  }
  std::fprintf(file, "\n]}\n");
  return std::fclose(file) == 0;
}

}  // namespace

int main(int argc, char** argv) {
  constexpr unsigned kCount = unsigned{kTokens} * kHeads * kHeadDim;
  Buffers b{};
  for (T** x : {&b.q, &b.k, &b.v, &b.out}) cudaMalloc(x, kCount * sizeof(T));
  cudaMalloc(&b.lse, unsigned{kTokens} * kHeads * sizeof(float));
  fill<<<kCount / 256, 256>>>(b.q, kCount, 0x1000000);
  fill<<<kCount / 256, 256>>>(b.k, kCount, 0x5000000);
  fill<<<kCount / 256, 256>>>(b.v, kCount, 0x9000000);
  cudaEvent_t start, stop;
  cudaEventCreate(&start), cudaEventCreate(&stop);
  std::vector<T> host(kCount), last(kCount);
  static float milliseconds[kStepCount][kCellCount][kRounds];
  static float difference[kStepCount][kCellCount];
  for (int c = 0; c < kCellCount; ++c) {
    for (int s = kStepCount - 1; s >= 0; --s) {  // the last step's output is what the others are compared with
      cudaMemset(b.out, 0xff, kCount * sizeof(T));
      kStepList[s].run(b, kCells[c]);
      cudaMemcpy((s == kStepCount - 1 ? last : host).data(), b.out, kCount * sizeof(T), cudaMemcpyDeviceToHost);
      for (unsigned i = 0; i < kCount && s < kStepCount - 1; i += 7) {
        const float d = std::fabs(__bfloat162float(host[i]) - __bfloat162float(last[i]));
        if (!(d <= difference[s][c])) difference[s][c] = d;
      }
    }
    for (int round = 0; round < kRounds; ++round) {
      for (int s = 0; s < kStepCount; ++s) {
        constexpr int kRuns = 4;
        cudaEventRecord(start);
        for (int i = 0; i < kRuns; ++i) kStepList[s].run(b, kCells[c]);
        cudaEventRecord(stop);
        cudaEventSynchronize(stop);
        cudaEventElapsedTime(&milliseconds[s][c][round], start, stop);
        milliseconds[s][c][round] /= kRuns;
      }
    }
  }
  static Result results[kStepCount][kCellCount];
  for (int s = 0; s < kStepCount; ++s) {
    std::printf("%-32s", kStepList[s].name);
    for (int c = 0; c < kCellCount; ++c) {
      float* times = milliseconds[s][c];
      std::sort(times, times + kRounds);
      const double flops = 4.0 * kTokens * kCells[c].seq * kHeads * kHeadDim * (kCells[c].causal ? 0.5 : 1.0);
      results[s][c] = {times[kRounds / 2], flops / times[kRounds / 2] * 1e-9, difference[s][c]};
      std::printf("  %6.0f (%.1e)", results[s][c].tflops, results[s][c].difference);
    }
    std::printf("\n");
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) std::printf("%s\n", cudaGetErrorString(error));
  const bool written = error != cudaSuccess || argc < 2 || write_json(argv[1], results);
  if (!written) std::printf("cannot write %s\n", argv[1]);
  return error == cudaSuccess && written ? 0 : 1;
}
