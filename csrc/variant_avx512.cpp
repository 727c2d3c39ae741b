// The kernels for one instruction set. Everything but the table has internal linkage: the linker must never put code
// of one variant on another's path.
#include "kernels.h"
#include "simd_avx512.h"

#include "elementwise.inl"
#include "linear.inl"
#include "attention.inl"
#include "probe.inl"

const Kernels kAvx512 = {"avx512", add_rms_norm, quantize, linear, gated_linear, rotary_write, attention_chunk,
  attention_merge, argmax, log_sum_exp, dot_products<12>, read_memory};
