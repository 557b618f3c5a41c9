#define RESILIENT_VECTOR_LEVEL portable
#include "runtime/comm/reduce_templates.h"
