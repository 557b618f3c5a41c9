#pragma once

#include <uv.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <resilient/status.h>

#include "runtime/net/socket.h"

// A thin ownership layer over libuv: an object owns its handle, its destructor closes the handle,
// and the memory is freed in libuv's close callback, never before. After Close no callback of the
// handle runs any more (those of pending writes excepted, which are told so), so an object may be
// destroyed from inside its own callback. Everything here is confined to the thread that runs the
// loop.
namespace resilient::store {

// The event loop. Owner: main or a test. Lifetime: outlives every handle made on it; the destructor
// checks that all of them were closed.
class UvLoop {
 public:
  UvLoop();
  ~UvLoop();
  UvLoop(const UvLoop&) = delete;
  UvLoop& operator=(const UvLoop&) = delete;

  void Run();  // Returns when no handle is open.
  uv_loop_t* get() { return &loop_; }

  // One read buffer for all streams: libuv hands it back in the very next callback, and no reader
  // keeps a reference.
  uv_buf_t read_buffer() {
    return uv_buf_init(read_buffer_.data(), static_cast<unsigned>(read_buffer_.size()));
  }

 private:
  uv_loop_t loop_;
  std::vector<char> read_buffer_;
};

// Common part of the handle classes below. `Callback` is what libuv's trampoline calls.
template <typename Handle, typename Callback>
class UvHandle {
 public:
  UvHandle(const UvHandle&) = delete;
  UvHandle& operator=(const UvHandle&) = delete;

  // Idempotent.
  void Close() {
    if (box_ == nullptr) return;
    uv_close(reinterpret_cast<uv_handle_t*>(&box_->handle),
             [](uv_handle_t* handle) { delete static_cast<Box*>(handle->data); });
    box_ = nullptr;
  }
  bool closed() const { return box_ == nullptr; }

 protected:
  // Lives until the close callback; `callback` too, as it may be what is running.
  struct Box {
    Handle handle{};
    Callback callback;
  };

  explicit UvHandle(Callback callback) : box_(new Box{{}, std::move(callback)}) {
    box_->handle.data = box_;
  }
  ~UvHandle() { Close(); }

  // For a handle whose uv_..._init failed: libuv does not know it.
  void Discard() { delete std::exchange(box_, nullptr); }

  static Callback& CallbackOf(Handle* handle) { return static_cast<Box*>(handle->data)->callback; }
  Handle* get() { return &box_->handle; }
  const Handle* get() const { return &box_->handle; }

 private:
  Box* box_;
};

// Fires at a fixed interval. Late fires are not made up for.
class UvTimer : public UvHandle<uv_timer_t, std::function<void()>> {
 public:
  UvTimer(UvLoop& loop, std::function<void()> on_fire);
  void Start(std::uint64_t first_ms, std::uint64_t repeat_ms);
};

// Runs once in each turn of the loop, after all events that were ready have been handled.
class UvCheck : public UvHandle<uv_check_t, std::function<void()>> {
 public:
  UvCheck(UvLoop& loop, std::function<void()> on_turn);
};

// While started the loop does not block for events.
class UvIdle : public UvHandle<uv_idle_t, std::function<void()>> {
 public:
  explicit UvIdle(UvLoop& loop);
  void Start();
  void Stop();
};

class UvSignal : public UvHandle<uv_signal_t, std::function<void()>> {
 public:
  UvSignal(UvLoop& loop, int signal, std::function<void()> on_signal);
};

// Runs its callback on the loop's thread soon after Send; several Sends may become one call.
class UvAsync : public UvHandle<uv_async_t, std::function<void()>> {
 public:
  UvAsync(UvLoop& loop, std::function<void()> on_send);
  void Send();  // From any thread. REQUIRES: not closed.
};

// Tells when a descriptor is readable; owns the descriptor and closes it after the handle stopped
// watching it.
class UvReadable : public UvHandle<uv_poll_t, std::function<void()>> {
 public:
  // Null when the loop cannot watch `fd`.
  static std::unique_ptr<UvReadable> Watch(UvLoop& loop, FileDescriptor fd,
                                           std::function<void()> on_readable);
  ~UvReadable() { Close(); }  // Before fd_ goes.

 private:
  UvReadable(UvLoop& loop, FileDescriptor fd, std::function<void()> on_readable, int* error);
  FileDescriptor fd_;
};

// What a stream tells its owner. Null functions are not called.
struct UvStreamEvents {
  std::function<void()> on_connection;  // A listener has a connection to Accept.
  std::function<void(std::string_view)> on_read;
  std::function<void(const std::string&)> on_end;  // The text is empty when the peer closed.
  std::function<void()> on_written;                // Something that was queued has been written.
};

// A stream socket, TCP or unix, listening or connected.
class UvStream : public UvHandle<uv_tcp_t, UvStreamEvents> {
 public:
  UvStream(UvLoop& loop, UvStreamEvents events);

  // Takes over a bound socket.
  Status Listen(const FileDescriptor& bound, int backlog);
  // False when the connection is gone. Not accepting keeps later ones in the kernel's queue.
  bool AcceptFrom(UvStream& listener);

  void ReadStart();
  void ReadStop();
  // Writes what fits now, nothing while something is queued. nullopt: the connection is broken.
  std::optional<std::size_t> TryWrite(std::string_view bytes);
  // Writes what fits now and queues the rest; `bytes` are empty then. False when the connection is
  // broken.
  bool Write(std::string& bytes);
  std::size_t QueuedBytes() const;
  // The peer reads an end after what was written. REQUIRES: nothing is queued.
  void EndWriting();
  // "127.0.0.1:4711", of a unix socket "user 1000 of this host"; or "unknown peer".
  std::string PeerName() const;
  int Descriptor() const;  // -1: none.

 private:
  struct WriteRequest;
  static void OnAlloc(uv_handle_t* handle, std::size_t suggested, uv_buf_t* buffer);
  static void OnRead(uv_stream_t* stream, ssize_t count, const uv_buf_t* buffer);
  uv_stream_t* stream() { return reinterpret_cast<uv_stream_t*>(get()); }
};

}  // namespace resilient::store
