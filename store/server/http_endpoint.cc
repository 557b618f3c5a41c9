#include "store/server/http_endpoint.h"

#include <fcntl.h>
#include <microhttpd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/base/log.h"

namespace resilient::store {
namespace {

constexpr std::size_t kMemoryPerConnection = 16u << 10;  // Longer headers are refused.
constexpr std::uint64_t kTimerMs = 1000;
constexpr int kRunsAtOnce = 16;  // Before the store has its turn again.

}  // namespace

// The daemon of libmicrohttpd. Owner: HttpEndpoint.
class HttpEndpoint::Library {
 public:
  // Null when the library refuses.
  static std::unique_ptr<Library> Start(const FileDescriptor& bound, const Handler& handler) {
    std::unique_ptr<Library> library(new Library(handler));
    // The library closes its own copy, with the daemon.
    const int copy = fcntl(bound.get(), F_DUPFD_CLOEXEC, 0);
    if (copy < 0) return nullptr;
    library->daemon_ =
        MHD_start_daemon(MHD_USE_EPOLL, 0, nullptr, nullptr, &Library::OnRequest, library.get(),
                         MHD_OPTION_LISTEN_SOCKET, copy, MHD_OPTION_CONNECTION_LIMIT,
                         kHttpConnectionsMax, MHD_OPTION_CONNECTION_TIMEOUT, kHttpTimeoutSeconds,
                         MHD_OPTION_CONNECTION_MEMORY_LIMIT, kMemoryPerConnection, MHD_OPTION_END);
    if (library->daemon_ != nullptr) return library;
    close(copy);
    return nullptr;
  }
  ~Library() {
    if (daemon_ != nullptr) MHD_stop_daemon(daemon_);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // A copy of the descriptor that tells when to Run.
  FileDescriptor WatchedDescriptor() const {
    const MHD_DaemonInfo* info = MHD_get_daemon_info(daemon_, MHD_DAEMON_INFO_EPOLL_FD);
    return FileDescriptor(info == nullptr ? -1 : fcntl(info->epoll_fd, F_DUPFD_CLOEXEC, 0));
  }
  // False: it would go on at once.
  bool Run() {
    MHD_UNSIGNED_LONG_LONG wait_ms = 0;
    // The library keeps connections that it could go on with, without asking the kernel for them.
    for (int i = 0; i < kRunsAtOnce; ++i) {
      MHD_run(daemon_);
      if (MHD_get_timeout(daemon_, &wait_ms) != MHD_YES || wait_ms > 0) return true;
    }
    return false;
  }

 private:
  explicit Library(const Handler& handler) : handler_(handler) {}

  static MHD_Result OnRequest(void* self, MHD_Connection* connection, const char* url,
                              const char* method, const char*, const char*, size_t* body_bytes,
                              void** state) {
    static char headers_seen;
    if (*state == nullptr) {
      *state = &headers_seen;
      return MHD_YES;
    }
    if (*body_bytes != 0) {
      *body_bytes = 0;  // Thrown away.
      return MHD_YES;
    }
    return static_cast<Library*>(self)->Answer(connection, url, method);
  }

  MHD_Result Answer(MHD_Connection* connection, const char* url, std::string_view method) const {
    HttpAnswer answer;
    const bool known = method == MHD_HTTP_METHOD_GET || method == MHD_HTTP_METHOD_HEAD;
    if (known) {
      answer = handler_(url);
    } else {
      answer = {MHD_HTTP_METHOD_NOT_ALLOWED, "text/plain", "only GET and HEAD are served\n"};
    }
    MHD_Response* response = MHD_create_response_from_buffer(answer.body.size(), answer.body.data(),
                                                             MHD_RESPMEM_MUST_COPY);
    if (response == nullptr) return MHD_NO;
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, answer.content_type.c_str());
    if (!known) MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    const MHD_Result queued = MHD_queue_response(connection, answer.status, response);
    MHD_destroy_response(response);
    return queued;
  }

  const Handler& handler_;
  MHD_Daemon* daemon_ = nullptr;
};

HttpEndpoint::HttpEndpoint(UvLoop& loop, Handler handler)
    : handler_(std::move(handler)), timer_(loop, [this] { Poll(); }) {}

HttpEndpoint::~HttpEndpoint() = default;

Result<std::unique_ptr<HttpEndpoint>> HttpEndpoint::Start(UvLoop& loop, const HostPort& listen,
                                                          Handler handler) {
  Result<FileDescriptor> bound = ListenTcp(listen, static_cast<int>(kHttpConnectionsMax));
  if (!bound.ok()) return bound.status();
  const Result<HostPort> local = LocalAddress(*bound);
  if (!local.ok()) return local.status();
  std::unique_ptr<HttpEndpoint> endpoint(new HttpEndpoint(loop, std::move(handler)));
  endpoint->address_ = *local;
  endpoint->library_ = Library::Start(*bound, endpoint->handler_);
  if (endpoint->library_ == nullptr) {
    return Status(
        StatusCode::kInternal,
        StrCat("libmicrohttpd cannot serve ", FormatHostPort(*local), ": ", std::strerror(errno)));
  }
  FileDescriptor watched = endpoint->library_->WatchedDescriptor();
  if (watched.valid()) {
    endpoint->readable_ =
        UvReadable::Watch(loop, std::move(watched), [raw = endpoint.get()] { raw->Poll(); });
  }
  if (endpoint->readable_ == nullptr) {
    return Status(StatusCode::kInternal,
                  StrCat("the loop cannot watch the HTTP server of ", FormatHostPort(*local)));
  }
  endpoint->timer_.Start(kTimerMs, kTimerMs);
  return endpoint;
}

void HttpEndpoint::Poll() {
  if (!library_->Run()) timer_.Start(1, kTimerMs);
}

}  // namespace resilient::store
