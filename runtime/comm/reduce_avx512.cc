#if defined(__x86_64__)
#define RESILIENT_VECTOR_LEVEL avx512
#include "runtime/comm/reduce_templates.h"
#endif
