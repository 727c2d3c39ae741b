// The kernels for one instruction set. Everything but the table has internal linkage: the linker must never put code
// of one variant on another's path.
#define PILOTFISH_DPBUSD _mm256_dpbusd_avx_epi32
#define PILOTFISH_DPWSSD _mm256_dpwssd_avx_epi32
#include "kernels.h"
#include "simd_avx2.h"

#include "variant.inl"

PILOTFISH_KERNELS(kAvxVnni, "avxvnni", 6);
