#include "torch_plugin/csrc/native_ending.h"

#include <cxxabi.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>
#include <resilient/per_process.h>

#include "torch_plugin/csrc/thread.h"

namespace resilient::plugin {
namespace {

// A store that is gone must not hold up the end.
constexpr std::chrono::seconds kAnnounceMax(1);
constexpr std::size_t kTextMax = 400;

// As "std::runtime_error: out of memory", of the exception that is being handled; empty: none.
std::string DescribeCurrent() {
  const std::type_info* type = abi::__cxa_current_exception_type();
  if (type == nullptr) return {};
  std::string text = c10::demangle(type->name());
  try {
    throw;
  } catch (const std::exception& error) {
    const std::string_view what = error.what();
    text += c10::str(": ", what.substr(0, what.find('\n')));
  } catch (...) {
    return text;  // Of a type that has no text.
  }
  if (text.size() > kTextMax) text = text.substr(0, kTextMax - 3) + "...";
  return text;
}

// The handler before ours, as a forked child inherits both.
std::atomic<std::terminate_handler> handler_before{nullptr};

// Owner: the process (PerProcess), as it is used until the end. Thread: thread-safe.
class NativeEnding {
 public:
  void Watch(const std::shared_ptr<SessionContext>& world) {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(installed_, true)) Install();
    std::erase_if(worlds_, [](const auto& one) { return one.expired(); });
    worlds_.push_back(world);
  }

  void Note(std::string text) {
    const std::lock_guard lock(mutex_);
    noted_ = std::move(text);
  }

 private:
  static void Install() {
    const std::terminate_handler before = std::set_terminate(&OnTerminate);
    if (before != &OnTerminate) handler_before.store(before);
    on_exit(&OnExit, nullptr);  // Who is called twice has told all worlds the first time.
  }

  [[noreturn]] static void OnTerminate();
  static void OnExit(int status, void* unused);

  // On another thread: this one may hold, below the exception, any lock there is.
  void Tell(const std::string& text) {
    std::vector<std::shared_ptr<SessionContext>> worlds;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& one : std::exchange(worlds_, {})) {
        if (auto world = one.lock()) worlds.push_back(std::move(world));
      }
    }
    if (worlds.empty()) return;
    const auto told = std::make_shared<std::promise<void>>();
    Result<std::thread> thread =
        StartThread("res-ending", [text, told, worlds = std::move(worlds)] {
          for (const auto& world : worlds) {
            const Instant now = world->clock().Now();
            world->session().AnnounceEnd(text, Deadline::After(now, Duration(kAnnounceMax)));
          }
          told->set_value();
        });
    if (!thread) return;
    thread->detach();  // It ends with the process.
    told->get_future().wait_for(kAnnounceMax);
  }

  std::mutex mutex_;
  // Guarded by mutex_:
  bool installed_ = false;
  std::vector<std::weak_ptr<SessionContext>> worlds_;
  std::string noted_;
};

constinit PerProcess<NativeEnding> ending;

void NativeEnding::OnTerminate() {
  const std::string text = DescribeCurrent();
  if (NativeEnding* const own = ending.Present()) own->Tell(text.empty() ? "std::terminate" : text);
  if (const std::terminate_handler before = handler_before.load()) before();
  std::abort();
}

void NativeEnding::OnExit(int status, void* /*unused*/) {
  NativeEnding* const own = ending.Present();
  if ((status & 0xff) == 0 || own == nullptr) return;
  std::string text = c10::str("exit(", status, ")");
  {
    const std::lock_guard lock(own->mutex_);
    if (!own->noted_.empty()) text = own->noted_ + ", then " + text;
  }
  own->Tell(text);
}

}  // namespace

void WatchEnding(const std::shared_ptr<SessionContext>& world) { ending.Get().Watch(world); }

void NoteException() { ending.Get().Note(DescribeCurrent()); }

}  // namespace resilient::plugin
