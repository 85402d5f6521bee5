/* Two equal keys: the output is the mean of the two values, the lse is ln 2. */
#include <onepass/onepass.h>
#include <stdio.h>

static DLTensor tensor(float* data, int32_t ndim, int64_t* shape) {
  DLTensor t = {0};
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = ndim;
  t.dtype.code = kDLFloat;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

int main(void) {
  float q[2] = {1, 2}, k[4] = {3, 4, 3, 4}, v[4] = {1, 10, 3, 30}, out[2] = {0, 0}, lse[1] = {0};
  int64_t shape_q[4] = {1, 1, 1, 2}, shape_k[4] = {1, 2, 1, 2}, shape_lse[3] = {1, 1, 1};
  DLTensor tq = tensor(q, 4, shape_q), tk = tensor(k, 4, shape_k), tv = tensor(v, 4, shape_k);
  DLTensor to = tensor(out, 4, shape_q), tl = tensor(lse, 3, shape_lse);
  static char memory[65536 + 64];
  onepass_options_t options = ONEPASS_OPTIONS_INIT;
  onepass_forward_args_t args = ONEPASS_FORWARD_ARGS_INIT;
  size_t bytes = 0;
  options.scale = 0;
  options.kernel = "fwd_cpu_oracle";
  args.options = &options;
  args.q = &tq, args.k = &tk, args.v = &tv, args.out = &to, args.lse = &tl;
  if (onepass_workspace_size(ONEPASS_FORWARD, &args, &bytes) != ONEPASS_OK || bytes > 65536) return 1;
  args.workspace = memory + (64 - (uintptr_t)memory % 64), args.workspace_size = bytes;
  if (onepass_forward(&args) != ONEPASS_OK) return fprintf(stderr, "%s\n", onepass_last_error()), 2;
  printf("onepass %s: %g %g, lse %g\n", onepass_version(), out[0], out[1], lse[0]);
  return out[0] == 2 && out[1] == 20 && fabs(lse[0] - 0.693147) < 1e-5 ? 0 : 3;
}
