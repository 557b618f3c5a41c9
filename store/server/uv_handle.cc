#include "store/server/uv_handle.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/net/local_socket.h"

namespace resilient::store {
namespace {

constexpr std::size_t kReadBufferBytes = 64u << 10;
constexpr std::size_t kKeptOutputBytes = 128;  // Of each stream, while nothing is to be written.
constexpr unsigned kKeepAliveSeconds = 60;     // Finds peers whose host vanished without a word.

// Failures of these calls mean a broken invariant (bad arguments, a full epoll), never bad input.
void MustSucceed(int result) { RESILIENT_CHECK(result == 0); }

}  // namespace

UvLoop::UvLoop() : read_buffer_(kReadBufferBytes) {
  MustSucceed(uv_loop_init(&loop_));
  loop_.data = this;
}

UvLoop::~UvLoop() {
  // Handles whose owners have just gone still wait for their close callbacks.
  uv_run(&loop_, UV_RUN_NOWAIT);
  RESILIENT_CHECK(uv_loop_close(&loop_) == 0);
}

void UvLoop::Run() { uv_run(&loop_, UV_RUN_DEFAULT); }

UvTimer::UvTimer(UvLoop& loop, std::function<void()> on_fire) : UvHandle(std::move(on_fire)) {
  MustSucceed(uv_timer_init(loop.get(), get()));
}

void UvTimer::Start(std::uint64_t first_ms, std::uint64_t repeat_ms) {
  MustSucceed(uv_timer_start(
      get(), [](uv_timer_t* timer) { CallbackOf(timer)(); }, first_ms, repeat_ms));
}

UvCheck::UvCheck(UvLoop& loop, std::function<void()> on_turn) : UvHandle(std::move(on_turn)) {
  MustSucceed(uv_check_init(loop.get(), get()));
  MustSucceed(uv_check_start(get(), [](uv_check_t* check) { CallbackOf(check)(); }));
}

UvIdle::UvIdle(UvLoop& loop) : UvHandle([] {}) { MustSucceed(uv_idle_init(loop.get(), get())); }

void UvIdle::Start() {
  MustSucceed(uv_idle_start(get(), [](uv_idle_t*) {}));
}

void UvIdle::Stop() { MustSucceed(uv_idle_stop(get())); }

UvSignal::UvSignal(UvLoop& loop, int signal, std::function<void()> on_signal)
    : UvHandle(std::move(on_signal)) {
  MustSucceed(uv_signal_init(loop.get(), get()));
  struct sigaction before = {};
  const bool known = sigaction(signal, nullptr, &before) == 0;
  if (known && before.sa_handler == SIG_IGN) return;  // As by nohup: it stays ignored.
  MustSucceed(uv_signal_start(
      get(), [](uv_signal_t* handle, int) { CallbackOf(handle)(); }, signal));
}

UvAsync::UvAsync(UvLoop& loop, std::function<void()> on_send) : UvHandle(std::move(on_send)) {
  MustSucceed(uv_async_init(loop.get(), get(), [](uv_async_t* async) { CallbackOf(async)(); }));
}

void UvAsync::Send() { MustSucceed(uv_async_send(get())); }

UvReadable::UvReadable(UvLoop& loop, FileDescriptor fd, std::function<void()> on_readable,
                       int* error)
    : UvHandle(std::move(on_readable)), fd_(std::move(fd)) {
  *error = uv_poll_init(loop.get(), get(), fd_.get());
  if (*error != 0) {
    Discard();
    return;
  }
  *error = uv_poll_start(get(), UV_READABLE, [](uv_poll_t* poll, int, int) { CallbackOf(poll)(); });
}

std::unique_ptr<UvReadable> UvReadable::Watch(UvLoop& loop, FileDescriptor fd,
                                              std::function<void()> on_readable) {
  int error = 0;
  std::unique_ptr<UvReadable> watch(
      new UvReadable(loop, std::move(fd), std::move(on_readable), &error));
  if (error != 0) watch.reset();
  return watch;
}

// One queued write; frees itself when done.
struct UvStream::WriteRequest {
  uv_write_t request{};
  std::string bytes;
};

UvStream::UvStream(UvLoop& loop, UvStreamEvents events) : UvHandle(std::move(events)) {
  MustSucceed(uv_tcp_init(loop.get(), get()));
}

Status UvStream::Listen(const FileDescriptor& bound, int backlog) {
  // The handle closes its own copy, at its own time.
  const int copy = fcntl(bound.get(), F_DUPFD_CLOEXEC, 0);
  if (copy < 0) {
    return Status(StatusCode::kInternal,
                  StrCat("cannot copy the listening socket: ", std::strerror(errno)));
  }
  int error = uv_tcp_open(get(), copy);
  if (error != 0) ::close(copy);
  if (error == 0) {
    error = uv_listen(stream(), backlog, [](uv_stream_t* listener, int status) {
      auto& events = CallbackOf(reinterpret_cast<uv_tcp_t*>(listener));
      if (status == 0 && events.on_connection) events.on_connection();
    });
  }
  if (error == 0) return Status::Ok();
  return Status(StatusCode::kInternal, StrCat("cannot listen: ", uv_strerror(error)));
}

bool UvStream::AcceptFrom(UvStream& listener) {
  if (uv_accept(listener.stream(), stream()) != 0) return false;
  // Latency over packing. Both fail on a unix socket, which needs neither, and on one that is
  // already dead, which a read will tell.
  uv_tcp_nodelay(get(), 1);
  uv_tcp_keepalive(get(), 1, kKeepAliveSeconds);
  if (UserOfPeer(Descriptor())) WidenLocalSocket(Descriptor());
  return true;
}

void UvStream::OnAlloc(uv_handle_t* handle, std::size_t, uv_buf_t* buffer) {
  *buffer = static_cast<UvLoop*>(handle->loop->data)->read_buffer();
}

void UvStream::OnRead(uv_stream_t* stream, ssize_t count, const uv_buf_t* buffer) {
  auto& events = CallbackOf(reinterpret_cast<uv_tcp_t*>(stream));
  if (count > 0) {
    events.on_read(std::string_view(buffer->base, static_cast<std::size_t>(count)));
  } else if (count < 0) {
    events.on_end(count == UV_EOF ? std::string() : uv_strerror(static_cast<int>(count)));
  }
}

void UvStream::ReadStart() {
  // The only failure is a stream that is already closing or at its end, where on_end has the word.
  (void)uv_read_start(stream(), &UvStream::OnAlloc, &UvStream::OnRead);
}

void UvStream::ReadStop() { uv_read_stop(stream()); }

std::optional<std::size_t> UvStream::TryWrite(std::string_view bytes) {
  if (QueuedBytes() > 0) return 0;
  // libuv does not change them.
  const uv_buf_t buffer =
      uv_buf_init(const_cast<char*>(bytes.data()), static_cast<unsigned>(bytes.size()));
  const int written = uv_try_write(stream(), &buffer, 1);
  if (written == UV_EAGAIN) return 0;
  if (written < 0) return std::nullopt;
  return static_cast<std::size_t>(written);
}

bool UvStream::Write(std::string& bytes) {
  const std::optional<std::size_t> written = TryWrite(bytes);
  if (!written) return false;
  const std::size_t done = *written;
  if (done == bytes.size()) {
    // A short one's memory serves the next.
    if (bytes.capacity() > kKeptOutputBytes) bytes = std::string();
    bytes.clear();
    return true;
  }
  auto* write = new WriteRequest{{}, std::exchange(bytes, {})};
  write->request.data = write;
  const uv_buf_t buffer =
      uv_buf_init(write->bytes.data() + done, static_cast<unsigned>(write->bytes.size() - done));
  const int error = uv_write(&write->request, stream(), &buffer, 1, [](uv_write_t* request, int) {
    // Errors reach the owner by the read side; a closed handle's owner is gone.
    uv_stream_t* stream = request->handle;
    delete static_cast<WriteRequest*>(request->data);
    if (uv_is_closing(reinterpret_cast<uv_handle_t*>(stream))) return;
    auto& events = CallbackOf(reinterpret_cast<uv_tcp_t*>(stream));
    if (events.on_written) events.on_written();
  });
  if (error == 0) return true;
  delete write;
  return false;
}

std::size_t UvStream::QueuedBytes() const {
  return uv_stream_get_write_queue_size(reinterpret_cast<const uv_stream_t*>(get()));
}

void UvStream::EndWriting() {
  if (const int fd = Descriptor(); fd >= 0) shutdown(fd, SHUT_WR);
}

int UvStream::Descriptor() const {
  uv_os_fd_t fd = -1;
  return uv_fileno(reinterpret_cast<const uv_handle_t*>(get()), &fd) == 0 ? fd : -1;
}

std::string UvStream::PeerName() const {
  sockaddr_storage address{};
  int length = sizeof(address);
  if (uv_tcp_getpeername(get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return "unknown peer";
  }
  if (address.ss_family == AF_UNIX) {
    const auto user = UserOfPeer(Descriptor());
    return user ? StrCat("user ", *user, " of this host") : "unknown peer";
  }
  char text[INET6_ADDRSTRLEN] = "";
  std::uint16_t port = 0;
  if (address.ss_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address);
    inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof(text));
    port = ntohs(v6->sin6_port);
  } else {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address);
    inet_ntop(AF_INET, &v4->sin_addr, text, sizeof(text));
    port = ntohs(v4->sin_port);
  }
  return FormatHostPort({text, port});
}

}  // namespace resilient::store
