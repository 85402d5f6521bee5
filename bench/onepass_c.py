"""The C interface of onepass through ctypes, as far as the comparison needs it: torch tensors in (batch, seq, heads,
dim) order with any strides, no copies."""

import ctypes as c

import torch

FORWARD, BACKWARD, DECODE = 0, 1, 2
# torch dtype: (DLPack type code, bits)
TYPES = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.float64: (2, 64),
         torch.int32: (0, 32)}


class DLTensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("device_type", c.c_int32), ("device_id", c.c_int32), ("ndim", c.c_int32),
                ("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16), ("shape", c.POINTER(c.c_int64)),
                ("strides", c.POINTER(c.c_int64)), ("byte_offset", c.c_uint64)]


P = c.POINTER(DLTensor)


def _struct(name, fields):
    return type(name, (c.Structure,), {"_fields_": [("struct_size", c.c_size_t), *fields]})


Options = _struct("Options", [
    ("causal", c.c_int32), ("align", c.c_int32), ("window_left", c.c_int64), ("window_right", c.c_int64),
    ("cu_seqlens_q", P), ("cu_seqlens_k", P), ("max_seqlen_q", c.c_int64), ("max_seqlen_k", c.c_int64),
    ("q_length", P), ("k_start", P), ("k_length", P), ("q_position", P),
    ("scale", c.c_double), ("softcap", c.c_double), ("alibi_slopes", P), ("bias", P), ("sinks", P),
    ("dropout_p", c.c_double), ("dropout_seed", c.c_uint64), ("dropout_offset", c.c_uint64), ("dropout_state", P),
    ("deterministic", c.c_int32), ("validate", c.c_int32), ("threads", c.c_int32), ("kernel", c.c_char_p),
    ("stream", c.c_void_p)])


def _args(name, tensors):
    return _struct(name, [("options", c.POINTER(Options)), *((t, P) for t in tensors.split()),
                          ("workspace", c.c_void_p), ("workspace_size", c.c_size_t)])


ARGS = {
    FORWARD: _args("ForwardArgs", "q k v out lse"),
    BACKWARD: _args("BackwardArgs", "q k v out lse grad_out grad_lse grad_q grad_k grad_v grad_bias grad_sinks"),
    DECODE: _args("DecodeArgs", "q k_cache v_cache cache_seqlens k_new v_new out lse"),
}
FUNCTIONS = {FORWARD: "onepass_forward", BACKWARD: "onepass_backward", DECODE: "onepass_decode"}


class KernelInfo(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("name", c.c_char_p), ("backend", c.c_char_p), ("arch", c.c_char_p),
                ("pass_", c.c_int32), ("dtypes", c.c_char_p), ("max_head_dim", c.c_int64), ("available", c.c_int32)]


def _descriptor(t):
    code, bits = TYPES[t.dtype]
    sizes = c.c_int64 * t.dim()
    device = (2, t.device.index) if t.is_cuda else (1, 0)
    return DLTensor(t.data_ptr(), *device, t.dim(), code, bits, 1, sizes(*t.shape), sizes(*t.stride()), 0)


class Library:
    def __init__(self, path):
        self.lib = c.CDLL(path)
        self.lib.onepass_version.restype = self.lib.onepass_last_error.restype = c.c_char_p
        self.version = self.lib.onepass_version().decode()

    def _check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.onepass_last_error().decode())

    def prepare(self, which, options=None, **tensors):
        """A function without arguments that makes the call; the workspace is allocated here, once."""
        o = Options(c.sizeof(Options), window_left=-1, window_right=-1, scale=float("nan"), deterministic=-1)
        for name, value in (options or {}).items():
            setattr(o, name, c.pointer(_descriptor(value)) if isinstance(value, torch.Tensor) else value)
        args = ARGS[which](c.sizeof(ARGS[which]), c.pointer(o))
        for name, tensor in tensors.items():
            setattr(args, name, c.pointer(_descriptor(tensor)))
        size = c.c_size_t()
        self._check(self.lib.onepass_workspace_size(which, c.byref(args), c.byref(size)))
        device = next(tensor.device for tensor in tensors.values())
        workspace = torch.empty(size.value + 64, dtype=torch.uint8, device=device)
        args.workspace = (workspace.data_ptr() + 63) // 64 * 64
        args.workspace_size = size.value
        function, reference = getattr(self.lib, FUNCTIONS[which]), c.byref(args)

        def call(keep=(workspace, tensors, options, args, o)):
            if device.type == "cuda":
                o.stream = torch.cuda.current_stream().cuda_stream
            if function(reference) != 0:
                self._check(1)

        return call, self.explain(which, args)

    def explain(self, which, args):
        length = c.c_size_t()
        self._check(self.lib.onepass_explain(which, c.byref(args), None, c.c_size_t(0), c.byref(length)))
        text = c.create_string_buffer(length.value + 1)
        self._check(self.lib.onepass_explain(which, c.byref(args), text, c.c_size_t(len(text)), c.byref(length)))
        return text.value.decode()

    def instruction_sets(self):
        """Instruction sets of the kernels that this machine can run, best first."""
        found = []
        for i in range(self.lib.onepass_kernel_count()):
            info = KernelInfo(c.sizeof(KernelInfo))
            self._check(self.lib.onepass_kernel_info(i, c.byref(info)))
            if info.available and info.arch.decode() not in found:
                found.append(info.arch.decode())
        return found
