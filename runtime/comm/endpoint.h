#pragma once

#include <string>
#include <string_view>

namespace resilient {

// What a rank tells the others of itself, as GroupMember::endpoint carries it: how to reach it, and
// the settings that must be the same on all ranks of a group. Thread: value type.
struct Endpoint {
  std::string address;        // Of its listener: "10.0.0.1:4711".
  bool hierarchical = false;  // How it reduces (RESILIENT_REDUCTION_ORDER).
  int streams = 1;            // Sockets of its links to other hosts (RESILIENT_SOCKET_STREAMS).
  bool encrypted = false;     // Its links over TCP (RESILIENT_LINK_TLS).
  std::string host_id;        // What ShmHostId says there; empty: no shared memory.
};

// "10.0.0.1:4711 rank 1 plain ID", without the last word where there is no host id.
std::string EncodeEndpoint(const Endpoint& endpoint);
// What is missing or makes no sense is as above by default.
Endpoint DecodeEndpoint(std::string_view text);

// As RESILIENT_REDUCTION_ORDER has it.
std::string_view OrderName(bool hierarchical);

}  // namespace resilient
