#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <resilient/status.h>

#include "runtime/net/socket.h"
#include "store/server/uv_handle.h"

namespace resilient::store {

inline constexpr unsigned kHttpConnectionsMax = 24;  // Within kDescriptorReserve.
inline constexpr unsigned kHttpTimeoutSeconds = 3;   // Of a connection that is silent.

struct HttpAnswer {
  unsigned status = 200;
  std::string content_type;
  std::string body;
};

// A small HTTP server for those who look at this one: GET and HEAD of what `handler` knows. It has
// a bounded number of connections of bounded memory and time, so that nobody can hurt the store
// through it. libmicrohttpd does the HTTP; its epoll descriptor is watched by our loop. Owner:
// Server. Thread: the loop's.
class HttpEndpoint {
 public:
  // The path begins with '/' and has no query.
  using Handler = std::function<HttpAnswer(std::string_view path)>;

  // Listens and serves. Errors as ListenTcp, kInternal when the library refuses.
  static Result<std::unique_ptr<HttpEndpoint>> Start(UvLoop& loop, const HostPort& listen,
                                                     Handler handler);
  ~HttpEndpoint();
  HttpEndpoint(const HttpEndpoint&) = delete;
  HttpEndpoint& operator=(const HttpEndpoint&) = delete;

  // With the real port.
  const HostPort& address() const { return address_; }
  // Serves what is ready, without waiting: for the time in which the loop does not run.
  void Poll();

 private:
  class Library;
  HttpEndpoint(UvLoop& loop, Handler handler);

  const Handler handler_;
  HostPort address_;
  std::unique_ptr<Library> library_;
  std::unique_ptr<UvReadable> readable_;
  UvTimer timer_;  // The library's own time limits.
};

}  // namespace resilient::store
