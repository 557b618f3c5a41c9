#include "torch_plugin/csrc/host.h"

#include "torch_plugin/csrc/convert.h"

namespace resilient::plugin {
namespace {

// The host of a plain C++ program. Thread: immutable.
class PlainHost final : public Host {
 public:
  Status Interrupted() override { return Status::Ok(); }
  std::string CallSite() override { return {}; }
  bool Ending() const override { return false; }
  void WithoutLock(const std::function<void()>& body) override { body(); }
  const std::shared_ptr<Observer>& observer() override { return observer_; }

 private:
  const SystemClock clock_{};
  const std::shared_ptr<Observer> observer_ = MakeObserver(clock_, nullptr);

  void DoThrow(const Status& status) override { ThrowNative(status); }
};

}  // namespace

std::exception_ptr ToException(Host& host, const Status& status) {
  try {
    host.Throw(status);
  } catch (...) {
    return std::current_exception();
  }
}

std::shared_ptr<Host> NativeHost() { return std::make_shared<PlainHost>(); }

}  // namespace resilient::plugin
