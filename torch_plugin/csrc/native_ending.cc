#include "torch_plugin/csrc/native_ending.h"

#include <cxxabi.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
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

// Owner: the process; never destroyed, as it is used until the end. Thread: thread-safe.
class NativeEnding {
 public:
  static NativeEnding& Instance() {
    static auto* const instance = new NativeEnding;
    return *instance;
  }

  void Watch(const std::shared_ptr<SessionContext>& world) {
    const std::lock_guard lock(mutex_);
    if (pid_ != getpid()) {
      if (pid_ == 0) Install();
      pid_ = getpid();
      worlds_.clear();
    }
    std::erase_if(worlds_, [](const auto& one) { return one.expired(); });
    worlds_.push_back(world);
  }

  void Note(std::string text) {
    const std::lock_guard lock(mutex_);
    noted_ = std::move(text);
  }

 private:
  void Install() {
    before_ = std::set_terminate(&OnTerminate);
    on_exit(&OnExit, nullptr);
  }

  [[noreturn]] static void OnTerminate() {
    NativeEnding& own = Instance();
    const std::string text = DescribeCurrent();
    own.Tell(text.empty() ? "std::terminate" : text);
    if (own.before_ != nullptr) own.before_();
    std::abort();
  }

  static void OnExit(int status, void* /*unused*/) {
    if ((status & 0xff) == 0) return;
    NativeEnding& own = Instance();
    std::string text = c10::str("exit(", status, ")");
    {
      const std::lock_guard lock(own.mutex_);
      if (!own.noted_.empty()) text = own.noted_ + ", then " + text;
    }
    own.Tell(text);
  }

  // On another thread: this one may hold, below the exception, any lock there is.
  void Tell(const std::string& text) {
    std::vector<std::shared_ptr<SessionContext>> worlds;
    {
      const std::lock_guard lock(mutex_);
      if (pid_ != getpid()) return;
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
  pid_t pid_ = 0;  // Of the process that watches.
  std::vector<std::weak_ptr<SessionContext>> worlds_;
  std::string noted_;
  std::terminate_handler before_ = nullptr;  // Constant after Install.
};

}  // namespace

void WatchEnding(const std::shared_ptr<SessionContext>& world) {
  NativeEnding::Instance().Watch(world);
}

void NoteException() { NativeEnding::Instance().Note(DescribeCurrent()); }

}  // namespace resilient::plugin
