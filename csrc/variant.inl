// All kernels over the sixteen lanes of the simd_*.h that was included before, and the table of them.
#include "elementwise.inl"
#include "panels.inl"
#include "linear.inl"
#include "attention.inl"
#include "probe.inl"
#include "sampling.inl"

// `chains`: independent sums that hide the latency of this instruction set's dot product and fit its registers.
#define PILOTFISH_KERNELS(table, name, chains)                                                                      \
  const Kernels table = {name,           add_rms_norm,    quantize,    linear,      gated_linear, rotary_write,     \
                         attention_chunk, attention_merge, argmax,      log_sum_exp, part_maxima,  weigh,            \
                         keep,            gumbel_argmax,   dot_products<chains>, read_memory}
