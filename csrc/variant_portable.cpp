// The kernels for one instruction set. Everything but the table has internal linkage: the linker must never put code
// of one variant on another's path.
#include "kernels.h"
#include "simd_portable.h"

#include "variant.inl"

PILOTFISH_KERNELS(kPortable, "portable", 4);
