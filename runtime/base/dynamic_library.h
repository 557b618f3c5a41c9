#pragma once

#include <dlfcn.h>

namespace resilient {

// Puts the address of a function of `library`, as of dlopen, into `function`. False, and null
// there, where the library has no function of that name, or is null itself.
template <typename Function>
bool FindFunction(void* library, const char* name, Function* function) {
  *function = library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace resilient
