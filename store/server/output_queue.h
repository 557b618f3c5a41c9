#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <string>
#include <string_view>

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

  void Clear() {
    front_.clear();
    parts_.clear();
  }
  bool empty() const { return front_.empty() && parts_.empty(); }
  std::size_t bytes() const;
  // Of these the ones that are stored for this queue: own bytes, and of each shared part what falls
  // to one of its holders.
  std::size_t memory_bytes() const;

  // The own bytes that come next, perhaps none. Whoever has taken them leaves it empty.
  std::string& next_own() { return front_; }
  // Puts the first step of a shared part behind the own bytes that come before it: a frame's header
  // is not worth a packet of its own.
  void JoinStep(std::size_t most = kStepBytes);
  // What is left of the shared part that comes next. REQUIRES, as the two below: no own bytes come
  // next; not empty.
  std::string_view next_shared() const;
  void DropShared(std::size_t bytes);
  // A copy of its next step, which is dropped.
  std::string TakeStep(std::size_t most = kStepBytes);

  // Large enough for few records of TLS and few system calls.
  static constexpr std::size_t kStepBytes = 16u << 10;
  // Of a plain connection, which sends what it can from the shared part itself, and holds a step
  // only to hear when there is room again: as little as makes no difference to the network, as
  // there may be one for each of 30,000 clients.
  static constexpr std::size_t kPlainStepBytes = 1u << 10;
  // Below this a copy costs less than to keep account of a part.
  static constexpr std::size_t kSharedBytesMin = 4u << 10;

 private:
  struct Part {  // Never taken as a whole: what is behind it is at the front then.
    std::shared_ptr<const std::string> shared;
    std::size_t taken = 0;
    std::string behind;  // Own bytes that follow it.
  };

  std::string front_;      // Own bytes before all shared parts.
  std::list<Part> parts_;  // Not a deque: an empty one would cost each idle client 600 bytes.
};

}  // namespace resilient::store
