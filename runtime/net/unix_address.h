#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <optional>
#include <string_view>

namespace resilient {

// Where a unix socket is (unix(7)). Thread: value type.
class UnixAddress {
 public:
  static constexpr std::size_t kNameMax = sizeof(sockaddr_un::sun_path) - 1;

  // In the abstract namespace: no file, and the kernel takes the name away with its socket.
  // nullopt: longer than kNameMax.
  static std::optional<UnixAddress> Abstract(std::string_view name);
  // In the file system. nullopt: longer than kNameMax.
  static std::optional<UnixAddress> Path(std::string_view path);

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address_); }
  socklen_t size() const { return size_; }

 private:
  UnixAddress(std::size_t before, std::string_view name);

  sockaddr_un address_{};
  socklen_t size_ = 0;
};

}  // namespace resilient
