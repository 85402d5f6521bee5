#include "operands.h"

#include "io/npy.h"
#include "io/output_file.h"
#include "shape.h"

namespace onepass::cli {
namespace {

/// The names that tensors have if the options give none and FILE holds them.
void default_names(Options& o, const TensorSource& source, std::size_t rank, std::string& notes) {
  const auto take = [&](std::string& option, const char* name) {
    if (!option.empty() || !source.has(name)) return;
    option = name;
    notes += (notes.empty() ? "" : ", ") + std::string(name);
  };
  if (rank == 3) {
    const bool none = o.cu_seqlens_q.empty() && o.cu_seqlens_k.empty();
    if (none && source.has("cu_seqlens_q")) {
      take(o.cu_seqlens_q, "cu_seqlens_q");
      take(o.cu_seqlens_k, "cu_seqlens_k");
    } else if (none) {
      take(o.cu_seqlens_q, "cu_seqlens");
    }
  } else if (o.cu_seqlens_q.empty()) {
    take(o.q_length, "q_length");
    take(o.k_start, "k_start");
    take(o.k_length, "k_length");
    take(o.q_position, "q_position");
  }
  if (o.backward) take(o.grad_out, "grad_out");
}

Status check_size(const std::vector<std::int64_t>& wanted, const char* option, std::int64_t size) {
  ONEPASS_ASSIGN(const std::int64_t expected, single(wanted, option, size));
  if (expected == size) return {};
  return usage_error("%s %lld does not fit the tensors, which have %lld; nearest: leave it out", option,
                     static_cast<long long>(expected), static_cast<long long>(size));
}

/// Sizes that the command line names must be those of the tensors.
Status check_sizes(const Options& o, const Attention& a) {
  if (!a.packed()) {
    ONEPASS_RETURN_IF_ERROR(check_size(o.batch, "--batch", a.q.size(0)));
    ONEPASS_RETURN_IF_ERROR(
        check_size(o.seq_q.empty() ? o.seq : o.seq_q, o.seq_q.empty() ? "--seq" : "--seq-q", a.q.size(1)));
    ONEPASS_RETURN_IF_ERROR(
        check_size(o.seq_k.empty() ? o.seq : o.seq_k, o.seq_k.empty() ? "--seq" : "--seq-k", a.k.size(1)));
  } else if (!o.batch.empty() || !o.seq.empty() || !o.seq_q.empty() || !o.seq_k.empty()) {
    return usage_error("--batch and --seq come from cu_seqlens for packed tensors; nearest: leave them out");
  }
  const std::size_t heads = a.q.rank() - 2, dim = a.q.rank() - 1;
  ONEPASS_RETURN_IF_ERROR(check_size(o.heads_q.empty() ? o.heads : o.heads_q,
                                     o.heads_q.empty() ? "--heads" : "--heads-q", a.q.size(heads)));
  ONEPASS_RETURN_IF_ERROR(check_size(o.heads_kv.empty() ? o.heads : o.heads_kv,
                                     o.heads_kv.empty() ? "--heads" : "--heads-kv", a.k.size(heads)));
  ONEPASS_RETURN_IF_ERROR(check_size(o.head_dim, "--head-dim", a.q.size(dim)));
  return check_size(o.head_dim_v, "--head-dim-v", a.v.size(dim));
}

class Loader {
 public:
  Loader(const RunOptions& options, const TensorSource& source, Operands& operands)
      : options_(options), source_(source), operands_(operands), attention_(operands.attention) {}

  Status load() {
    ONEPASS_ASSIGN(q_, stored(options_.q));
    if (q_.rank() != 3 && q_.rank() != 4) return wrong_rank(options_.q, q_);
    if (options_.dtypes.size() > 1)
      return usage_error("--dtype takes one type here: got %zu; nearest: --dtype %s", options_.dtypes.size(),
                         name_of(options_.dtypes[0]));
    Options named = options_;
    default_names(named, source_, q_.rank(), operands_.notes);
    ONEPASS_RETURN_IF_ERROR(load_modifiers(named, source_, attention_));
    layout_ = {options_.layout == "bhsd", attention_.packed()};
    ONEPASS_ASSIGN(k_, stored(options_.k));
    ONEPASS_ASSIGN(v_, stored(options_.v));
    if (k_.rank() != q_.rank()) return wrong_rank(options_.k, k_);
    if (v_.rank() != q_.rank()) return wrong_rank(options_.v, v_);
    if (layout_.packed && q_.rank() != 3) return wrong_rank(options_.q, q_);
    attention_.q = layout_.operand(q_);
    attention_.k = layout_.operand(k_);
    attention_.v = layout_.operand(v_);
    ONEPASS_RETURN_IF_ERROR(check_sizes(options_, attention_));

    out_shape_ = q_.shape();
    out_shape_.back() = v_.shape().back();
    const bool flat = q_.rank() == 3;  // lse without the batch of 1
    const std::size_t heads = layout_.heads_first ? (flat ? 0 : 1) : (flat ? 1 : 2), seq = (flat ? 1 : 3) - heads;
    std::vector<std::int64_t> lse_shape = {q_.size(heads), q_.size(seq)};
    if (!flat) lse_shape.insert(lse_shape.begin(), q_.size(0));
    ONEPASS_RETURN_IF_ERROR(output("out", q_.type(), out_shape_, attention_.out));
    ONEPASS_ASSIGN(Array lse, Array::allocate(ElementType::f32, lse_shape));
    operands_.outputs.emplace_back("lse", lse);
    attention_.lse = layout_.rows(lse);
    return options_.backward ? load_backward(named.grad_out) : Status();
  }

 private:
  Result<Array> stored(const std::string& name) {
    ONEPASS_ASSIGN(Array array, source_.load(name));
    if (options_.dtypes.empty() || options_.dtypes[0] == array.type()) return array;
    return array.converted(options_.dtypes[0]);
  }

  Status wrong_rank(const std::string& name, const Array& array) const {
    return usage_error(
        "'%s' of shape %s must have 4 dimensions, or, like q, 3: %s", printable(name, 60).c_str(),
        shape_text(array.shape()).c_str(),
        layout_.packed ? "packed with cu_seqlens (tokens, heads, head_dim)" : "(seq, heads, head_dim) of one sequence");
  }

  Status output(const char* name, ElementType type, const std::vector<std::int64_t>& shape, Array& target) {
    ONEPASS_ASSIGN(Array array, Array::allocate(type, shape));
    target = layout_.operand(array);
    operands_.outputs.emplace_back(name, std::move(array));
    return {};
  }

  Status load_backward(const std::string& grad_out_name) {
    Array grad_out;
    if (grad_out_name.empty()) {
      ONEPASS_ASSIGN(grad_out, Array::allocate(q_.type(), out_shape_));
      fill_normal(grad_out, options_.seed);
      operands_.notes += (operands_.notes.empty() ? "" : ", ") + std::string("grad_out drawn from N(0,1)");
    } else {
      ONEPASS_ASSIGN(grad_out, stored(grad_out_name));
      if (grad_out.shape() != out_shape_) {
        return usage_error("'%s' has shape %s; the output's is %s", printable(grad_out_name, 60).c_str(),
                           shape_text(grad_out.shape()).c_str(), shape_text(out_shape_).c_str());
      }
    }
    attention_.grad_out = layout_.operand(grad_out);
    ONEPASS_RETURN_IF_ERROR(output("grad_q", q_.type(), q_.shape(), attention_.grad_q));
    ONEPASS_RETURN_IF_ERROR(output("grad_k", k_.type(), k_.shape(), attention_.grad_k));
    ONEPASS_RETURN_IF_ERROR(output("grad_v", v_.type(), v_.shape(), attention_.grad_v));
    const auto modifier = [&](const char* name, const Array& of, Array& target) -> Status {
      if (!of) return {};
      ONEPASS_ASSIGN(target, Array::allocate(ElementType::f32, of.shape()));
      operands_.outputs.emplace_back(name, target);
      return {};
    };
    ONEPASS_RETURN_IF_ERROR(modifier("grad_bias", attention_.bias, attention_.grad_bias));
    return modifier("grad_sinks", attention_.sinks, attention_.grad_sinks);
  }

  const RunOptions& options_;
  const TensorSource& source_;
  Operands& operands_;
  Attention& attention_;
  StoredLayout layout_;
  Array q_, k_, v_;
  std::vector<std::int64_t> out_shape_;
};

bool is_npy(const std::string& path) {
  return path.ends_with(".npy");
}

}  // namespace

Array StoredLayout::operand(const Array& stored) const {
  if (stored.rank() == 4) return heads_first ? stored.transposed(1, 2) : stored;
  const Array rows = heads_first ? stored.transposed(0, 1) : stored;
  return packed ? rows : rows.with_leading_one();
}

Array StoredLayout::rows(const Array& stored) const {
  return stored.rank() == 2 && !packed ? stored.with_leading_one() : stored;
}

Status load_operands(const RunOptions& options, Operands& operands) {
  TensorSource source;
  ONEPASS_RETURN_IF_ERROR(source.open(options.file));
  ONEPASS_ASSIGN(operands.attention.kernel, single_kernel(options));
  options.apply(operands.attention);
  return Loader(options, source, operands).load();
}

Status check_output(const std::string& path) {
  if (path.empty()) return {};
  if (!is_npy(path) && !path.ends_with(".safetensors")) {
    return usage_error("-o writes .safetensors or .npy: got '%s'; nearest: %s.safetensors", printable(path).c_str(),
                       printable(path).c_str());
  }
  const Result<OutputFile> probe = OutputFile::create(path);
  return probe.ok() ? Status() : probe.error();
}

Status write_outputs(const Operands& operands, const std::string& kernel, const std::string& path,
                     std::string& report) {
  std::vector<TensorView> views;
  for (const auto& [name, array] : operands.outputs) views.push_back(array.file_view(name));
  if (!is_npy(path)) {
    ONEPASS_ASSIGN(OutputFile file, OutputFile::create(path));
    ONEPASS_RETURN_IF_ERROR(write_safetensors(file, views, {{"onepass", onepass_version()}, {"kernel", kernel}}));
    ONEPASS_RETURN_IF_ERROR(file.commit());
    report += path + ":";
    for (const TensorView& view : views) report += " " + view.name + " " + shape_text(view.shape);
    return {};
  }
  std::vector<OutputFile> files;
  for (const TensorView& view : views) {
    const std::string name = view.name == "out" ? path : path.substr(0, path.size() - 4) + "." + view.name + ".npy";
    ONEPASS_ASSIGN(OutputFile file, OutputFile::create(name));
    ONEPASS_RETURN_IF_ERROR(write_npy(file, view));
    ONEPASS_RETURN_IF_ERROR(file.finish());
    files.push_back(std::move(file));
    report += (report.ends_with(' ') || report.empty() ? "" : ", ") + name;
  }
  for (OutputFile& file : files) ONEPASS_RETURN_IF_ERROR(file.commit());
  return {};
}

}  // namespace onepass::cli
