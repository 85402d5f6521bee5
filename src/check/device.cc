#include "check/device.h"

#if defined(ONEPASS_CUDA)
#include <cuda_runtime.h>

#include "cuda/host/device.h"
#include "cuda/host/launch.h"
#endif

namespace onepass::check {

#if defined(ONEPASS_CUDA)
using cuda::status_of;

DeviceMirror::DeviceMirror(const std::vector<Block>& blocks) : blocks_(blocks) {
  constexpr std::size_t kAlignment = 256;
  std::size_t size = 0;
  for (const Block& block : blocks_) {
    offsets_.push_back(size);
    size += (block.bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  void* memory = nullptr;
  uploaded_ = status_of(cudaMalloc(&memory, size + 1), "memory for a case");
  if (!uploaded_.ok()) return;
  memory_.reset(memory, [](void* p) { cudaFree(p); });
  uploaded_ = upload(blocks_);
}

Status DeviceMirror::upload(const std::vector<Block>& blocks) const {
  for (std::size_t n = 0; n < blocks_.size(); ++n) {
    ONEPASS_RETURN_IF_ERROR(status_of(cudaMemcpy(static_cast<char*>(memory_.get()) + offsets_[n], blocks[n].data,
                                                 blocks_[n].bytes, cudaMemcpyHostToDevice),
                                      "upload"));
  }
  return {};
}

Status DeviceMirror::download(const std::vector<Block>& blocks) const {
  ONEPASS_RETURN_IF_ERROR(status_of(cudaDeviceSynchronize(), "kernel"));
  for (std::size_t n = 0; n < blocks_.size(); ++n) {
    ONEPASS_RETURN_IF_ERROR(status_of(cudaMemcpy(blocks[n].data, static_cast<char*>(memory_.get()) + offsets_[n],
                                                 blocks_[n].bytes, cudaMemcpyDeviceToHost),
                                      "download"));
  }
  return {};
}

std::shared_ptr<void> device_memory(std::size_t bytes) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, bytes + 1) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return {memory, [](void* p) { cudaFree(p); }};
}

Status time_on_device(const std::function<Status(void* stream)>& run, int calls, double* seconds) {
  struct Handles {
    cudaStream_t stream = nullptr;
    cudaEvent_t first = nullptr, last = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    ~Handles() {
      if (replay != nullptr) cudaGraphExecDestroy(replay);
      if (graph != nullptr) cudaGraphDestroy(graph);
      if (last != nullptr) cudaEventDestroy(last);
      if (first != nullptr) cudaEventDestroy(first);
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
  } h;
  const auto check = [](cudaError_t error) { return status_of(error, "timing"); };
  ONEPASS_RETURN_IF_ERROR(check(cudaStreamCreateWithFlags(&h.stream, cudaStreamNonBlocking)));
  ONEPASS_RETURN_IF_ERROR(check(cudaEventCreate(&h.first)));
  ONEPASS_RETURN_IF_ERROR(check(cudaEventCreate(&h.last)));
  ONEPASS_RETURN_IF_ERROR(check(cudaStreamBeginCapture(h.stream, cudaStreamCaptureModeThreadLocal)));
  Status status;
  for (int n = 0; n < calls && status.ok(); ++n) status = run(h.stream);
  const Status captured = check(cudaStreamEndCapture(h.stream, &h.graph));
  ONEPASS_RETURN_IF_ERROR(status);
  ONEPASS_RETURN_IF_ERROR(captured);
  ONEPASS_RETURN_IF_ERROR(check(cudaGraphInstantiate(&h.replay, h.graph, 0)));
  ONEPASS_RETURN_IF_ERROR(check(cudaGraphLaunch(h.replay, h.stream)));
  ONEPASS_RETURN_IF_ERROR(check(cudaEventRecord(h.first, h.stream)));
  ONEPASS_RETURN_IF_ERROR(check(cudaGraphLaunch(h.replay, h.stream)));
  ONEPASS_RETURN_IF_ERROR(check(cudaEventRecord(h.last, h.stream)));
  ONEPASS_RETURN_IF_ERROR(check(cudaStreamSynchronize(h.stream)));
  float milliseconds = 0;
  ONEPASS_RETURN_IF_ERROR(check(cudaEventElapsedTime(&milliseconds, h.first, h.last)));
  *seconds = 1e-3 * static_cast<double>(milliseconds) / calls;
  return {};
}

std::string gpu_name() {
  cuda::DeviceInfo info;
  return cuda::device_count() > 0 && cuda::device_info(0, &info).ok() ? info.name : std::string();
}
std::string gpu_driver() {
  return cuda::driver_version();
}
#else
DeviceMirror::DeviceMirror(const std::vector<Block>&) : uploaded_(unsupported("this build computes on the CPU only")) {}
Status DeviceMirror::download(const std::vector<Block>&) const {
  return uploaded_;
}
Status DeviceMirror::upload(const std::vector<Block>&) const {
  return uploaded_;
}
std::shared_ptr<void> device_memory(std::size_t) {
  return nullptr;
}
Status time_on_device(const std::function<Status(void* stream)>&, int, double*) {
  return unsupported("this build computes on the CPU only");
}
std::string gpu_name() {
  return {};
}
std::string gpu_driver() {
  return {};
}
#endif

const void* DeviceMirror::find(const void* host) const {
  const auto* address = static_cast<const char*>(host);
  for (std::size_t n = 0; n < blocks_.size(); ++n) {
    const auto* begin = static_cast<const char*>(blocks_[n].data);
    if (address >= begin && address <= begin + blocks_[n].bytes && memory_ != nullptr) {
      return static_cast<const char*>(memory_.get()) + offsets_[n] + (address - begin);
    }
  }
  return host;
}

Problem DeviceMirror::at(const Problem& problem) const {
  Problem p = problem;
  p.on_device = true;
  MaskSpec& m = p.mask;
  for (const std::int32_t** array :
       {&m.cu_seqlens_q, &m.cu_seqlens_k, &m.q_length, &m.k_start, &m.k_length, &m.q_position}) {
    *array = at(*array);
  }
  p.score.alibi_slopes.data = at(p.score.alibi_slopes.data);
  p.score.bias.data = at(p.score.bias.data);
  p.score.sinks.data = at(p.score.sinks.data);
  p.score.dropout.state = at(p.score.dropout.state);
  return p;
}

ForwardOperands DeviceMirror::at(const ForwardOperands& operands) const {
  ForwardOperands o = operands;
  for (Tensor* tensor : {&o.q, &o.k, &o.v, &o.out}) tensor->data = at(tensor->data);
  o.lse.data = at(o.lse.data);
  return o;
}

BackwardOperands DeviceMirror::at(const BackwardOperands& operands) const {
  BackwardOperands o = operands;
  for (Tensor* tensor : {&o.q, &o.k, &o.v, &o.out, &o.grad_out, &o.grad_q, &o.grad_k, &o.grad_v}) {
    tensor->data = at(tensor->data);
  }
  for (RowTensor* rows : {&o.lse, &o.grad_lse}) rows->data = at(rows->data);
  o.grad_bias.data = at(o.grad_bias.data);
  o.grad_sinks.data = at(o.grad_sinks.data);
  return o;
}

}  // namespace onepass::check
