#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <string>

namespace resilient::store {

// The bytes that wait to be given to one socket. Own ones are stored here; a shared part (a view or
// the values of an exchange, the same for thousands of clients) is referred to until its turn, and
// then leaves in steps, so that what waits for all clients is stored once and not for each. Owner:
// Connection. Thread: the loop's.
class OutputQueue {
 public:
  // Own bytes are appended to this. Valid until the next call.
  std::string& tail() { return parts_.empty() ? front_ : parts_.back().behind; }
  // To be sent after all that is here. A small one is copied.
  void Append(std::shared_ptr<const std::string> shared);

  bool empty() const { return bytes() == 0; }
  std::size_t bytes() const { return own_bytes() + shared_bytes_; }
  std::size_t own_bytes() const;

  // The own bytes that come next, perhaps none. Whoever has taken them leaves it empty.
  std::string& next_own() { return front_; }
  // The next step of the shared part that comes next. REQUIRES: no own bytes come next; not empty.
  std::string TakeShared();

  static constexpr std::size_t kSharedStep = 32u << 10;

 private:
  struct Part {
    std::shared_ptr<const std::string> shared;
    std::size_t taken = 0;
    std::string behind;  // Own bytes that follow it.
  };

  std::string front_;      // Own bytes before all shared parts.
  std::list<Part> parts_;  // Not a deque: an empty one would cost each idle client 600 bytes.
  std::size_t shared_bytes_ = 0;
  std::size_t behind_bytes_ = 0;  // Of all parts but the last.
};

}  // namespace resilient::store
