// The Python module: pointers and sizes in, nothing else. `pilotfish.ops.native` checks what it passes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "layers.h"

namespace nb = nanobind;

namespace {

// Rows of a file's matrix as float: y [num_ids, k]. Throws for an id beyond num_rows.
void embedding(int type, uintptr_t rows, int64_t num_rows, int64_t k, uintptr_t ids, int64_t num_ids, uintptr_t y) {
  const WeightType weight_type = static_cast<WeightType>(type);
  const BlockShape shape = block_shape(weight_type);
  const int64_t row_bytes = k / shape.weights * shape.file_bytes;
  const FloatMode mode;
  for (int64_t i = 0; i < num_ids; i++) {
    const int32_t id = pointer<const int32_t>(ids)[i];
    if (id < 0 || id >= num_rows) {
      throw std::out_of_range("embedding: there is no row " + std::to_string(id) + " among " + std::to_string(num_rows));
    }
    dequantize_row(weight_type, pointer<const uint8_t>(rows) + id * row_bytes, k, pointer<float>(y) + i * k);
  }
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available()) names.push_back(kernels->name);
  return names;
}

}  // namespace

NB_MODULE(_kernels, m) {
  nb::set_leak_warnings(false);  // what Python's caches hold to the end is no leak
  const auto free_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Buffer>(m, "Buffer")
      .def(nb::init<size_t>(), nb::arg("size"))
      .def_prop_ro("address", &Buffer::address)
      .def_prop_ro("size", &Buffer::size);
  nb::class_<Variant>(m, "Variant")
      .def(nb::init<const std::string&, int>(), nb::arg("isa"), nb::arg("threads"))
      .def("argmax", &Variant::argmax, nb::arg("x"), nb::arg("num_rows"), nb::arg("size"), free_gil)
      .def("log_sum_exp", &Variant::log_sum_exp, nb::arg("x"), nb::arg("num_rows"), nb::arg("size"), nb::arg("y"),
           free_gil)
      .def("distribution", &Variant::distribution, nb::arg("x"), nb::arg("size"), nb::arg("temperature"),
           nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"), nb::arg("ids"), nb::arg("probs"), free_gil)
      .def("largest", &Variant::largest, nb::arg("x"), nb::arg("size"), nb::arg("count"), nb::arg("ids"), free_gil)
      .def("residual", &Variant::residual, nb::arg("p_ids"), nb::arg("p"), nb::arg("p_count"), nb::arg("q_ids"),
           nb::arg("q"), nb::arg("q_count"), nb::arg("ids"), nb::arg("probs"), free_gil)
      .def("gumbel_argmax", &Variant::gumbel_argmax, nb::arg("ids"), nb::arg("probs"), nb::arg("count"),
           nb::arg("stream"), free_gil)
      .def("dot_products", &Variant::dot_products, nb::arg("iterations"), free_gil)
      .def("read_memory", &Variant::read_memory, nb::arg("address"), nb::arg("size"), free_gil);
  nb::class_<HeadNorms>(m, "HeadNorms")
      .def(nb::init<uintptr_t, float, uintptr_t, float, int64_t>(), nb::arg("query"), nb::arg("query_eps"),
           nb::arg("key"), nb::arg("key_eps"), nb::arg("head_dim"));
  nb::class_<Attention>(m, "Attention")
      .def(nb::init<const Variant&, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t,
                    uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t, int64_t>(),
           nb::arg("variant"), nb::arg("positions"), nb::arg("slot_mapping"), nb::arg("query_start_loc"),
           nb::arg("seq_lens"), nb::arg("page_table"), nb::arg("cos"), nb::arg("sin"), nb::arg("keys"),
           nb::arg("values"), nb::arg("filled"), nb::arg("num_rows"), nb::arg("num_seqs"), nb::arg("max_pages"),
           nb::arg("num_positions"), nb::arg("num_pages"), nb::arg("page_size"), nb::arg("num_heads"),
           nb::arg("num_kv_heads"), nb::arg("head_dim"))
      .def(
          "run",
          [](const Attention& self, int64_t layer, const HeadNorms* norms, uintptr_t qkv, uintptr_t y) {
            self.run(layer, norms, pointer<float>(qkv), pointer<float>(y));
          },
          nb::arg("layer"), nb::arg("norms").none(), nb::arg("qkv"), nb::arg("y"), free_gil);
  nb::class_<LinearLayer>(m, "LinearLayer")
      .def(nb::init<const Variant&, int64_t, uintptr_t, float, bool>(), nb::arg("variant"), nb::arg("k"),
           nb::arg("norm"), nb::arg("eps"), nb::arg("gated"))
      .def("add", &LinearLayer::add, nb::arg("type"), nb::arg("num_outputs"), nb::arg("bias"), free_gil)
      .def("pack", &LinearLayer::pack, nb::arg("buffer"), nb::arg("offset"), nb::arg("rows"), nb::keep_alive<1, 2>(), free_gil)
      .def(
          "run",
          [](const LinearLayer& self, uintptr_t x, uintptr_t delta, int64_t num_rows, uintptr_t y) {
            use_huge_pages(pointer<float>(y), num_rows * self.num_outputs() * sizeof(float));
            self.run(pointer<float>(x), pointer<const float>(delta), num_rows, pointer<float>(y));
          },
          nb::arg("x"), nb::arg("delta"), nb::arg("num_rows"), nb::arg("y"), free_gil)
      .def_prop_ro("num_bytes", &LinearLayer::num_bytes);
  nb::class_<DecoderLayers>(m, "DecoderLayers")
      .def(nb::init<>())
      .def("add", &DecoderLayers::add, nb::arg("qkv"), nb::arg("head_norms").none(), nb::arg("attention_output"),
           nb::arg("gate_up"), nb::arg("down"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>())
      .def(
          "run",
          [](const DecoderLayers& self, const Attention& attention, uintptr_t x, int64_t num_rows) {
            self.run(attention, pointer<float>(x), num_rows);
          },
          nb::arg("attention"), nb::arg("x"), nb::arg("num_rows"), free_gil);
  m.def("embedding", &embedding, nb::arg("type"), nb::arg("rows"), nb::arg("num_rows"), nb::arg("k"), nb::arg("ids"),
        nb::arg("num_ids"), nb::arg("y"), free_gil);
  m.def("instruction_sets", &instruction_sets);
}
