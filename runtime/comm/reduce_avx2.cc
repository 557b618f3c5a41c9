#if defined(__x86_64__)
#define RESILIENT_VECTOR_LEVEL avx2
#include "runtime/comm/reduce_templates.h"
#endif
