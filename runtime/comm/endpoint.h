#pragma once

#include <string>
#include <string_view>

namespace resilient {

// How peers reach a rank, as GroupMember::endpoint carries it: the address of its listener and,
// behind a space, what ShmHostId says there (nothing: no shared memory). Thread: value type.
struct Endpoint {
  std::string address;  // "10.0.0.1:4711"
  std::string host_id;
};

inline std::string EncodeEndpoint(const Endpoint& endpoint) {
  return endpoint.host_id.empty() ? endpoint.address : endpoint.address + ' ' + endpoint.host_id;
}

inline Endpoint DecodeEndpoint(std::string_view text) {
  const std::size_t space = text.find(' ');
  Endpoint endpoint;
  endpoint.address = text.substr(0, space);
  if (space != std::string_view::npos) endpoint.host_id = text.substr(space + 1);
  return endpoint;
}

}  // namespace resilient
