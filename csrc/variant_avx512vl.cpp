// The kernels for one instruction set. Everything but the table has internal linkage: the linker must never put code
// of one variant on another's path.
//
// This is the code of variant_avxvnni.cpp on AVX-512's encoding of the same 256-bit instructions. It never comes first:
// it lets tests run that code on CPUs that have AVX-512 VNNI but not AVX-VNNI.
#define PILOTFISH_DPBUSD _mm256_dpbusd_epi32
#define PILOTFISH_DPWSSD _mm256_dpwssd_epi32
#include "kernels.h"
#include "simd_avx2.h"

#include "variant.inl"

PILOTFISH_KERNELS(kAvx512Vl, "avx512vl", 8);
