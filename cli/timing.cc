#include "timing.h"

#include <algorithm>
#include <map>

#include "report.h"

namespace onepass::cli {
namespace {

constexpr double kShortestSample = 200e-6;  // seconds

std::size_t padded_bytes(const Array& array) {
  const std::uint64_t bytes = bytes_of(array.shape(), array.type()).value_or(std::uint64_t{1} << 62);
  return (bytes + 63) / 64 * 64;
}

/// Gives planned arrays places in one block, one after the other.
class Placer {
 public:
  explicit Placer(std::shared_ptr<std::byte> block) : block_(std::move(block)) {}
  void place(Array& array) {
    if (!array) return;
    const std::size_t bytes = padded_bytes(array);
    array = Array::view(array.type(), array.shape(), block_, block_.get() + offset_);
    offset_ += bytes;
  }

 private:
  std::shared_ptr<std::byte> block_;
  std::size_t offset_ = 0;
};

}  // namespace

Timing summarise(std::vector<double> seconds) {
  if (seconds.empty()) return {};
  std::sort(seconds.begin(), seconds.end());
  const std::size_t n = seconds.size();
  return {(seconds[(n - 1) / 2] + seconds[n / 2]) / 2, seconds.front(), seconds.back(), static_cast<int>(n)};
}

Result<std::unique_ptr<Cell>> Cell::make(const Shape& shape, const Options& options) {
  auto cell = std::make_unique<Cell>();
  cell->shape_ = shape;
  ONEPASS_RETURN_IF_ERROR(plan_shape(shape, options, cell->attention_));
  ONEPASS_ASSIGN(cell->plan_, cell->attention_.explain(shape.pass));
  cell->keys_ = shape.pass == ONEPASS_DECODE ? visible_keys(shape, options) : Interval{};
  return cell;
}

std::size_t Cell::shared_bytes() const {
  const Attention& a = attention_;
  const std::size_t inputs = padded_bytes(a.q) + padded_bytes(a.k) + padded_bytes(a.v);
  return shape_.pass == ONEPASS_BACKWARD ? inputs + padded_bytes(a.out)
                                         : inputs + padded_bytes(a.out) + padded_bytes(a.lse);
}

std::size_t Cell::own_bytes() const {
  return shape_.pass == ONEPASS_BACKWARD ? padded_bytes(attention_.out) + padded_bytes(attention_.lse) : 0;
}

Status Cell::prepare(std::shared_ptr<std::byte> inputs, std::shared_ptr<std::byte> outputs,
                     const std::shared_ptr<const check::DeviceMirror>& device) {
  Attention& a = attention_;
  Placer in(std::move(inputs)), out(std::move(outputs));
  for (Array* array : {&a.q, &a.k, &a.v, &a.grad_out}) in.place(*array);
  if (shape_.pass == ONEPASS_DECODE) {
    const std::int64_t capacity = a.k.size(1);
    if (capacity > INT32_MAX)
      return unsupported("a decode's cache holds at most 2147483647 keys: got %lld; nearest: that",
                         static_cast<long long>(capacity));
    ONEPASS_ASSIGN(a.cache_seqlens, Array::allocate(ElementType::i32, {a.q.size(0)}));
    std::fill_n(a.cache_seqlens.as<std::int32_t>(), a.q.size(0), static_cast<std::int32_t>(capacity));
    if (!a.on_device) reads_ = CacheReads(a, keys_, plan_["threads"].get<int>());
  }
  if (shape_.pass != ONEPASS_BACKWARD) {
    out.place(a.out);
    out.place(a.lse);
    return runner_.prepare(a, shape_.pass, device);
  }
  ONEPASS_RETURN_IF_ERROR(a.allocate_outputs(ONEPASS_FORWARD));
  Runner forward;
  ONEPASS_RETURN_IF_ERROR(forward.prepare(a, ONEPASS_FORWARD, device));
  ONEPASS_RETURN_IF_ERROR(forward.run());
  ONEPASS_RETURN_IF_ERROR(forward.fetch());
  for (Array* array : {&a.grad_q, &a.grad_k, &a.grad_v}) out.place(*array);
  return runner_.prepare(a, ONEPASS_BACKWARD, device);
}

Result<double> Cell::sample() {
  if (calls_ == 0) {
    ONEPASS_RETURN_IF_ERROR(runner_.run());  // cold
    ONEPASS_ASSIGN(const double once, runner_.seconds(1));
    // A GPU's clock settles over milliseconds.
    const double shortest = attention_.on_device ? 6e-3 : kShortestSample;
    calls_ = static_cast<int>(std::clamp(shortest / std::max(once, 1e-9), 1.0, 1000.0));
  }
  return runner_.seconds(calls_);
}

Status prepare_cells(std::vector<std::unique_ptr<Cell>>& cells, std::uint64_t seed) {
  std::map<ElementType, std::size_t> inputs;
  std::size_t outputs = 64;
  double bytes = 0;
  for (const auto& cell : cells) {
    std::size_t& block = inputs[cell->shape().dtype];
    block = std::max(block, cell->shared_bytes());
    outputs = std::max(outputs, cell->shared_bytes());
    bytes += static_cast<double>(cell->own_bytes()) + cell->plan().value("workspace_bytes", 0.0);
  }
  for (const auto& [dtype, block] : inputs) bytes += static_cast<double>(block);
  bytes += static_cast<double>(outputs);
  if (bytes > 0.9 * memory_available()) return no_memory(bytes, "the operands of this benchmark");

  const std::shared_ptr<std::byte> output_block = aligned_memory(outputs);
  if (output_block == nullptr) return no_memory(bytes, "the operands of this benchmark");
  std::map<ElementType, std::shared_ptr<std::byte>> blocks;
  for (const auto& [dtype, block] : inputs) {
    const auto count = static_cast<std::int64_t>(block / size_of(dtype));
    ONEPASS_ASSIGN(Array array, Array::allocate(dtype, {count}));
    fill_normal(array, seed);
    blocks[dtype] = array.memory();
  }
  std::shared_ptr<const check::DeviceMirror> device;
  if (!cells.empty() && cells[0]->on_device()) {
    std::vector<check::Block> shared = {{output_block.get(), outputs}};
    for (const auto& [dtype, block] : blocks) shared.push_back({block.get(), inputs[dtype]});
    device = std::make_shared<check::DeviceMirror>(shared);
    ONEPASS_RETURN_IF_ERROR(device->status());
  }
  Progress progress("preparing", cells.size());
  for (std::size_t i = 0; i < cells.size(); ++i) {
    ONEPASS_RETURN_IF_ERROR(cells[i]->prepare(blocks[cells[i]->shape().dtype], output_block, device));
    progress.set(i + 1);
  }
  return {};
}

Status run_rounds(std::vector<std::unique_ptr<Cell>>& cells, int reps) {
  double round = 0;
  Progress warming("warming up", cells.size());
  for (std::size_t i = 0; i < cells.size(); ++i) {
    ONEPASS_ASSIGN(const double seconds, cells[i]->sample());
    round += std::max(seconds, kShortestSample);
    warming.set(i + 1);
  }
  constexpr double kBudget = 60;  // seconds
  const int rounds = reps > 0 ? reps : static_cast<int>(std::clamp(kBudget / std::max(round, 1e-6), 3.0, 15.0));
  Progress progress("timing", cells.size() * static_cast<std::size_t>(rounds));
  std::size_t done = 0;
  for (int r = 0; r < rounds; ++r) {
    for (std::size_t i = 0; i < cells.size(); ++i) {
      // Every other round runs backwards, so that no cell always follows the same one.
      Cell& cell = *cells[r % 2 == 0 ? i : cells.size() - 1 - i];
      cell.sample_reads();  // the last of them leaves the caches as each found them, and as the decode finds them
      ONEPASS_ASSIGN(const double seconds, cell.sample());
      cell.seconds.push_back(seconds);
      progress.set(++done);
    }
  }
  return {};
}

}  // namespace onepass::cli
