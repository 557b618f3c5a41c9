#pragma once

#include <string>
#include <tuple>

#include <resilient/tls.h>

namespace resilient::plugin {

// Certificate, key and CA as Python has them.
using TlsTuple = std::tuple<std::string, std::string, std::string>;

inline TlsFiles ToTlsFiles(const TlsTuple& files) {
  const auto& [certificate, key, authority] = files;
  return {certificate, key, authority};
}

inline TlsTuple ToTuple(const TlsFiles& files) {
  return {files.certificate, files.key, files.authority};
}

}  // namespace resilient::plugin
