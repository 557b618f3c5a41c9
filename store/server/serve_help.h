#pragma once

#include <string>

namespace resilient::store {

// What `resilient-store serve --help` says before and after the list of options.
std::string ServeDescription();
std::string ServeFooter();

}  // namespace resilient::store
