#pragma once

#include <string>
#include <tuple>
#include <utility>

#include <resilient/tls.h>

namespace resilient::plugin {

// Certificate, key and CA as Python has them.
using TlsTuple = std::tuple<std::string, std::string, std::string>;

inline TlsFiles ToTlsFiles(TlsTuple files) {
  auto& [certificate, key, authority] = files;
  return {std::move(certificate), std::move(key), std::move(authority)};
}

inline TlsTuple ToTuple(const TlsFiles& files) {
  return {files.certificate, files.key, files.authority};
}

}  // namespace resilient::plugin
